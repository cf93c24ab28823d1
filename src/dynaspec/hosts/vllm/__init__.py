"""vLLM as a host: its own engine, with dynaspec's controllers deciding how much is drafted.

``--scheduler-cls dynaspec.hosts.vllm.Scheduler`` is all that vLLM is told; settings are in its ``additional_config``,
under ``dynaspec`` (see ``settings``). Importing this package does not import vLLM.
"""

from __future__ import annotations

from typing import Any

from .compat import check_vllm

__all__ = ["Scheduler"]


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
