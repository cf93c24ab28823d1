"""The HTTP endpoints; each file has a ``router``."""
