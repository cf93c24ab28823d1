"""Paged attention, one file a device."""
