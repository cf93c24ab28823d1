"""Training of EAGLE-3 heads: one decoder layer that drafts from a model's own hidden states."""
