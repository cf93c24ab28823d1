"""Who runs in a step, with how many rows and which KV blocks; and what becomes of the result."""
