"""Room for as many connections as a load needs."""

from __future__ import annotations

import resource

from dynaspec.contract.errors import ConfigError

_OTHERS = 64
"""Files that a process has open beside its connections."""


def allow_connections(count: int) -> None:
    """Raises this process's limit of open files, as far as it may, to so many connections and what else it needs.

    Raises:
        ConfigError: the system allows fewer.
    """
    needed = count + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{count} requests at once need more open files than the {hard} that the system allows; "
            f"expected --max-concurrency of at most {hard - _OTHERS}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
