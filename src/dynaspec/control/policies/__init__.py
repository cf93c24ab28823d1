"""The policies, one controller each, and what builds them."""
