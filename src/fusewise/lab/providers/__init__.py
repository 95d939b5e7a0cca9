"""Our own providers, one file a family."""
