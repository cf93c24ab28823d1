"""The page at ``/``: what an engine does, drawn while it does it."""
