"""What passes cost here: a few trials before a session's first draft, where its policy weighs costs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import StopRule

from .drafters import AssistantDrafter

logger = logging.getLogger(__name__)

_TARGET_ROWS = (1, 8, 24)
"""Between them a pass's price is a line in ``auto``, and beyond them as long as nothing else is seen."""
_DEPTHS = (1, 4)
"""Of the assistant's drafts: from their difference follows what a pass takes."""
_ROUNDS, _FEWEST = 6, 3
"""Of trials; the first ones load code and memory."""
_BUDGET_S = 0.3
"""Of all trials; once it is spent, the fewest rounds are enough."""
_TO_THE_END = StopRule((0.0,), signal="survival")
"""Stops nothing, but its signal is gathered, as in the drafts to come."""
_PADDING = ("attention_mask", "decoder_attention_mask", "position_ids", "decoder_position_ids", "token_type_ids")
"""Inputs as long as the prompt."""


_Times = dict[int, float]
"""Seconds by rows or passes. The fastest trial counts, as what else the machine is doing only ever adds."""


def measure_costs(
    target: Any,
    inputs: Mapping[str, Any],
    text: torch.Tensor,
    assistant: AssistantDrafter | None,
    clock: Callable[[], float],
) -> PassCosts:
    """Times passes of the target, and drafts of the assistant between them, as they will come.

    Args:
        target: the model that is about to generate.
        inputs: as Transformers has prepared them for it.
        text: [1, L]
        assistant: the first proposer; has read the text afterwards. None = lookups alone.
        clock: seconds.

    Returns:
        No costs where a model cannot be run like this, or the target has read something already: they are learnt from
        the first steps then.
    """
    try:
        if inputs["past_key_values"].get_seq_length():
            return PassCosts()
        return _as_costs(*_trials(target, inputs, text, assistant, clock))
    except Exception:  # every family of models has inputs of its own
        logger.debug("passes could not be timed beforehand", exc_info=True)
        if assistant is not None:
            assistant.begin_anew()
        return PassCosts()


def _trials(
    target: Any,
    inputs: Mapping[str, Any],
    text: torch.Tensor,
    assistant: AssistantDrafter | None,
    clock: Callable[[], float],
) -> tuple[_Times, _Times]:
    """Of the target by rows, of drafts by passes."""
    target_s: _Times = {}
    draft_s: _Times = {}
    started = clock()
    with torch.random.fork_rng([text.device] if text.device.type == "cuda" else []):
        for done in range(_ROUNDS):
            if done >= _FEWEST and clock() - started > _BUDGET_S:
                break
            for i, rows in enumerate(_TARGET_ROWS):
                seconds = _target_s(target, inputs, text, rows, clock)
                target_s[rows] = min(seconds, target_s.get(rows, seconds))
                if assistant is not None and i < len(_DEPTHS):
                    began = clock()
                    passes = assistant.rehearse(text, _DEPTHS[i], _TO_THE_END)
                    seconds = clock() - began
                    draft_s[passes] = min(seconds, draft_s.get(passes, seconds))
    return target_s, draft_s


def _as_costs(target_s: _Times, draft_s: _Times) -> PassCosts:
    target = tuple(target_s.items())
    few, many = min(draft_s, default=0), max(draft_s, default=0)
    if few == many:  # too little room to draft, or every draft ended at once
        return PassCosts(target=target)
    pass_s = max(0.0, draft_s[many] - draft_s[few]) / (many - few)
    first_s = max(0.0, draft_s[few] - few * pass_s)
    return PassCosts(target=target, drafters=(((1, pass_s),),) if pass_s else (), first_s=(first_s,))


def _target_s(
    model: Any, inputs: Mapping[str, Any], text: torch.Tensor, rows: int, clock: Callable[[], float]
) -> float:
    """Of a pass over ``rows`` tokens."""
    tokens = text[:, :1].repeat(1, rows)
    scratch = {name: value for name, value in inputs.items() if name not in _PADDING}
    scratch["past_key_values"] = copy.deepcopy(inputs["past_key_values"])
    arguments = model.prepare_inputs_for_generation(
        tokens, next_sequence_length=rows, is_first_iteration=False, **scratch
    )
    if "logits_to_keep" in arguments:
        arguments["logits_to_keep"] = rows
    started = clock()
    model(**arguments, return_dict=True).logits[0, -1, 0].item()
    return clock() - started
