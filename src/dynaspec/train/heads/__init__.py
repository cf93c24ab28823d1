"""Training of heads that draft from a model's own hidden states: what all kinds share, and a file for each kind."""
