"""Draft-length policies and the configuration that chooses among them. No tensors, no clocks, no torch."""
