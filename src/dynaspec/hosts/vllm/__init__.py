"""vLLM as a host: its own engine, with dynaspec's controllers deciding how much is drafted.

``--scheduler-cls dynaspec.hosts.vllm.Scheduler`` is all that vLLM is told where a drafter of its own drafts; where
dynaspec's does, vLLM is also told the name of that (``Drafter``). Settings are in its ``additional_config``, under
``dynaspec`` (see ``settings``). Importing this package does not import vLLM.
"""

from __future__ import annotations

from typing import Any

from .compat import check_vllm

__all__ = ["Drafter", "Scheduler"]


class Scheduler:
    """Stands in for a scheduler class of vLLM's: calling it gives a scheduler.

    It is a subclass of vLLM's synchronous scheduler or of its asynchronous one, as vLLM is configured; without
    speculation, vLLM's own.

    Raises:
        ConfigError: settings or a vLLM that do not do.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        check_vllm()
        from .scheduler import build_scheduler

        return build_scheduler(vllm_config, *args, **kwargs)


class Drafter:
    """Stands in for a drafter of vLLM's ``custom_class``: calling it gives dynaspec's own.

    ``--speculative-config '{"method": "custom_class", "model": "dynaspec.hosts.vllm.Drafter", …}'``; with what it
    drafts is said in ``additional_config`` too.

    Raises:
        ConfigError: settings or a vLLM that do not do.
    """

    def __new__(cls, vllm_config: Any) -> Any:
        check_vllm()
        from .drafter import WorkerDrafter

        return WorkerDrafter(vllm_config)
