"""vLLM as a host: its own engine, with dynaspec's controllers deciding how much is drafted.

``--scheduler-cls dynaspec.hosts.vllm.Scheduler`` is all that vLLM is told where a drafter of its own drafts; where
dynaspec's does, vLLM is also told the name of that (``Drafter``). Settings are in its ``additional_config``, under
``dynaspec`` (see ``settings``). Importing this package does not import vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .compat import check_vllm

if TYPE_CHECKING:
    from .drafting import Drafting

__all__ = ["Drafter", "Scheduler"]

logger = logging.getLogger(__name__)


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
    """What vLLM's model runner holds as its drafter: dynaspec's drafting, behind vLLM's interface for ``custom_class``.

    ``--speculative-config '{"method": "custom_class", "model": "dynaspec.hosts.vllm.Drafter", …}'``; with what it
    drafts is said in ``additional_config`` too. A fault of it costs no request: it is logged, and from then on nothing
    is drafted.

    Raises:
        ConfigError: a vLLM that does not do.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_vllm()
        self._config = vllm_config
        self._drafting: Drafting | None = None

    def load_model(self, target: Any) -> None:
        """vLLM has loaded the target.

        What the drafter needs is imported here and not before: on a CPU vLLM 0.32 looks through all modules while it
        loads a model, and stumbles over one of numba's.

        Raises:
            CheckpointError, ConfigError, CapacityError: see ``build_drafting``.
        """
        from .drafting import build_drafting

        self._drafting = build_drafting(self._config, time.perf_counter)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for each row of vLLM's batch.

        Args:
            sampled_token_ids: what the step has brought each row; nothing while it reads its prompt.
            num_tokens_no_spec: [≥ rows] int, tokens of each row's text, these included.
            token_ids_cpu: [≥ rows, max_model_len] int32, the texts.
            slot_mappings: of the target's pass, by layer, or none.
        """
        if self._drafting is None:
            return [[] for _ in sampled_token_ids]
        try:
            rows = _rows(slot_mappings)
            return self._drafting.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, rows)
        except Exception:  # whatever it is, it must not cost a request
            self._drafting = None
            logger.exception("dynaspec's drafter has failed; from now on vLLM decodes plainly")
            return [[] for _ in sampled_token_ids]


def _rows(slot_mappings: Any) -> int | None:
    """Of the target's pass: a slot each."""
    if isinstance(slot_mappings, Mapping) and slot_mappings:
        return int(next(iter(slot_mappings.values())).shape[0])
    return None
