"""What is learnt while decoding: how likely drafted tokens are to be accepted, and what steps cost."""
