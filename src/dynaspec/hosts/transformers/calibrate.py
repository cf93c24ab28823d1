"""What passes cost here: a few trials before a session's first draft, where its policy weighs costs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dynaspec.contract.costs import PassCosts

logger = logging.getLogger(__name__)

_TARGET_ROWS = (1, 8)
"""Between them a pass's price is a line in ``auto``, and beyond them as long as nothing else is seen."""
_TRIALS = 2
_PADDING = ("attention_mask", "decoder_attention_mask", "position_ids", "decoder_position_ids", "token_type_ids")
"""Inputs as long as the prompt."""


def measure_costs(target: Any, inputs: Mapping[str, Any], text: torch.Tensor, clock: Callable[[], float]) -> PassCosts:
    """Times passes of the target; of the trials the fastest counts, as what else the machine is doing only ever adds.
    What the assistant takes is learnt from its first drafts.

    Args:
        target: the model that is about to generate.
        inputs: as Transformers has prepared them for it.
        text: [1, L]
        clock: seconds.

    Returns:
        No costs where the model cannot be run like this, or has read something already: they are learnt from the first
        steps then.
    """
    try:
        if inputs["past_key_values"].get_seq_length():
            return PassCosts()
        return PassCosts(target=tuple((rows, _seconds(target, inputs, text, rows, clock)) for rows in _TARGET_ROWS))
    except Exception:  # every family of models has inputs of its own
        logger.debug("passes could not be timed beforehand", exc_info=True)
        return PassCosts()


def _seconds(model: Any, inputs: Mapping[str, Any], text: torch.Tensor, rows: int, clock: Callable[[], float]) -> float:
    """Of a pass over ``rows`` tokens."""
    tokens = text[:, :1].repeat(1, rows)
    trials = []
    for _ in range(1 + _TRIALS):  # the first one warms up
        scratch = {name: value for name, value in inputs.items() if name not in _PADDING}
        scratch["past_key_values"] = copy.deepcopy(inputs["past_key_values"])
        arguments = model.prepare_inputs_for_generation(
            tokens, next_sequence_length=rows, is_first_iteration=False, **scratch
        )
        if "logits_to_keep" in arguments:
            arguments["logits_to_keep"] = rows
        started = clock()
        model(**arguments, return_dict=True).logits[0, -1, 0].item()
        trials.append(clock() - started)
    return min(trials[1:])
