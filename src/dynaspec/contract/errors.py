"""Every error dynaspec raises on purpose. The messages say what was given and what is expected."""

from __future__ import annotations


class DynaspecError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(DynaspecError, ValueError):
    """A configuration value, or a combination of values, that cannot work."""


class CheckpointError(DynaspecError, ValueError):
    """A checkpoint that is missing, incomplete, corrupt or of an unsupported kind."""


class RequestError(DynaspecError, ValueError):
    """A request that can never be served as it was given; no other request is affected."""


class CapacityError(DynaspecError, RuntimeError):
    """Not enough memory for what was asked."""


class ProposerFault(DynaspecError, RuntimeError):
    """A proposer raised or returned nonsense; its requests go on as plain decoding."""


class IntegrityError(DynaspecError, RuntimeError):
    """An internal invariant does not hold. Always a bug in dynaspec."""
