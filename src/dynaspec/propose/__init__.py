"""Drafters: one file an algorithm."""
