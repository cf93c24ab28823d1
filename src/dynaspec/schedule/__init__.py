"""Which requests run in a step, with how many rows and KV blocks; and what becomes of the result."""
