"""dynaspec's own drafters inside a worker of vLLM's, for its method ``custom_class``."""
