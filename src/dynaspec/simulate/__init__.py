"""Replays acceptance traces through the production controllers, for loads and hardware nobody has at hand. No torch."""
