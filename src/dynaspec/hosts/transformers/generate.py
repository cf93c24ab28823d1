"""``generate``: Transformers' assisted generation with draft lengths chosen at run time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationMixin

from dynaspec.contract.errors import ConfigError
from dynaspec.control.config import SpeculativeConfig
from dynaspec.observe.stats import SpecStats

from .call import Call
from .session import SESSIONS, Session
from .setup import resolve_setup


def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    assistant_model: Any = None,
    speculative_config: Mapping[str, Any] | str | SpeculativeConfig | None = None,
    stats: SpecStats | None = None,
    decision_log: str | Path | None = None,
    session: Session | None = None,
    **generation: Any,
) -> Any:
    """``model.generate(inputs, assistant_model=…, **generation)``, with draft lengths that a controller chooses.

    What is returned, given to a streamer or raised is Transformers' own.

    Args:
        model: a Transformers model that can generate.
        inputs: see ``GenerationMixin.generate``.
        assistant_model: the model that drafts; None = ``prompt_lookup_num_tokens`` or ``assistant_early_exit`` is among
            the other arguments, or ``speculative_config`` names the method ``ngram``.
        speculative_config: see ``docs/transformers-host.md``; None = policy ``auto``.
        stats: added to, step by step.
        decision_log: file that every decision of this call is written to, anew.
        session: what is learnt and kept; None = one that calls with the same models and configuration share, or, for a
            call with a ``decision_log``, a new one.
        generation: everything else that ``generate`` takes.

    Raises:
        ConfigError: a model, an assistant or a configuration that cannot be driven.
        RequestError: more than one sequence.
        ValueError: whatever else Transformers refuses.
    """
    _check_model(model, "model")
    if assistant_model is not None:
        _check_model(assistant_model, "assistant_model")
    if session is not None and decision_log is not None:
        raise ConfigError("session and decision_log are both given; expected the log to be the session's")
    setup = resolve_setup(speculative_config, model, assistant_model, generation)
    lent: AbstractContextManager[Session]
    if session is not None:
        lent = nullcontext(session)
    elif decision_log is not None:
        lent = Session(decision_log=decision_log)
    else:
        lent = SESSIONS.lend(model, assistant_model, setup)
    with lent as kept, kept.serving(setup):
        call = Call(model, kept, setup, stats)
        try:
            return call.generate(inputs, assistant_model, generation)
        finally:
            call.finish()


def _check_model(model: Any, name: str) -> None:
    if not isinstance(model, GenerationMixin):
        raise ConfigError(f"{name} is a {type(model).__name__}; expected a Transformers model that can generate")
