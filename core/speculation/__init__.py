"""Speculative decoding: what may come next, how likely it is, and how much of it is worth verifying."""
