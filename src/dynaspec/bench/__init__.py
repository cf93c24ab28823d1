"""Data sets, policy comparisons, the demonstration, and the provenance of their figures."""
