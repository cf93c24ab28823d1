"""The values and protocols that the parts of dynaspec share. Standard library and numpy only."""
