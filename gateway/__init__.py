"""The HTTP side: API, streams, routing, supervisor, command line."""
