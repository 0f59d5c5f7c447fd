"""The wire between gateways and engines."""
