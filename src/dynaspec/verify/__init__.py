"""Exact acceptance of drafted tokens."""
