"""Other engines, with dynaspec's controllers and without."""
