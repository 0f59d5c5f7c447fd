"""Servers to measure ours against, each as its pattern is usually written."""
