"""Model families, and the registry that picks one by `config.json`."""
