"""What to configure, from what was measured: a profile, decision logs, or both."""
