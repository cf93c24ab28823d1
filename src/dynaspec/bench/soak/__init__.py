"""Hours of unruly callers in minutes: whether a server answers everyone, forgets nobody and keeps its memory."""
