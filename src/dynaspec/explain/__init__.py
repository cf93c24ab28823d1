"""What decision logs and profiles say: ``dynaspec explain`` and ``dynaspec recommend``."""
