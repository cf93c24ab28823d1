"""Paged KV memory: blocks, their owners, the prefix cache, and the arenas that hold the numbers."""
