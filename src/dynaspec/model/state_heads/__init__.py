"""Heads that draft from one hidden state of the target, its last after the final norm, and keep no KV."""
