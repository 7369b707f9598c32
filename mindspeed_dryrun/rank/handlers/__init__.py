"""Handlers of the patches that need code: each takes the original function and returns its replacement."""
