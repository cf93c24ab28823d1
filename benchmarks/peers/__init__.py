"""Engines that ``vs_peers.py`` compares, each in a process and an environment of its own."""
