"""EAGLE-3 heads (Li et al., 2503.01840): drafters that read hidden states of their target."""
