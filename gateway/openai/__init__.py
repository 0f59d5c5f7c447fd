"""OpenAI's HTTP API: parsing of requests, shapes of answers, handlers."""
