"""Built-in providers, one module per family."""
