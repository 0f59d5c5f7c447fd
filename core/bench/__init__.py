"""Measurements of the engine itself, without a gateway: `headrace bench engine`."""
