"""The engine: configuration, construction, the step, and what surrounds it."""
