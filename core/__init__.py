"""The engine: scheduler, KV bookkeeping, models, sampling."""
