"""The HTTP endpoints, one file a family; each has a ``router``."""
