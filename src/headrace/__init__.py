"""Headrace: a streaming inference service for Mixture-of-Experts language models."""

__version__ = "0.1.0"
