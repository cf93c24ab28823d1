"""Training of small language models: a target and the drafter that is distilled from it."""
