"""What vLLM's model runner holds as its drafter: dynaspec's drafting, behind vLLM's interface for ``custom_class``."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .drafting.drafting import Drafting

logger = logging.getLogger(__name__)


class WorkerDrafter:
    """A fault of it costs no request: it is logged, and from then on nothing is drafted."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._drafting: Drafting | None = None

    def load_model(self, target: Any) -> None:
        """vLLM has loaded the target.

        What the drafter needs is imported here and not before: on a CPU vLLM 0.32 looks through all modules while it
        loads a model, and stumbles over one of numba's.

        Raises:
            CheckpointError, ConfigError, CapacityError: see ``build_drafting``.
        """
        from .drafting.build import build_drafting

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
