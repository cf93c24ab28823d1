"""Whether a grammar and the token lists of the same request leave anything to begin with."""

from __future__ import annotations

import numpy as np

from dynaspec.contract.errors import RequestError
from dynaspec.contract.sampling_params import SamplingParams

from .grammar import Grammar
from .grammar_state import GrammarState
from .rules import Needs, Rules


def check_first_token(grammar: Grammar, rules: Rules, params: SamplingParams, vocab_size: int) -> None:
    """Costs one mask, and only where a request has both a grammar and one of the lists.

    A form that empty output has is never refused: its request ends at once.

    Args:
        grammar: ``params.structured_outputs``, compiled.
        rules: of ``params``.
        vocab_size: tokens of the model.

    Raises:
        RequestError: they leave no first token.
    """
    if not rules.needs & (Needs.ALLOWED | Needs.BAD_WORDS):
        return
    first = GrammarState(grammar, rules.stops.tolist(), params.min_tokens).allowed(())
    if first.complete:
        return
    left = np.unpackbits(first.bits.view(np.uint8), bitorder="little")[:vocab_size].astype(np.bool_)
    if rules.needs & Needs.ALLOWED:
        left[np.setdiff1d(np.arange(left.size), rules.allowed)] = False
    banned = rules.completed_by(())
    left[banned[banned < left.size]] = False
    if not left.any():
        lists = [name for name in ("allowed_token_ids", "bad_words") if getattr(params, name)]
        raise RequestError(
            f"structured_outputs and {' and '.join(lists)} together leave no first token; expected at least one"
        )
