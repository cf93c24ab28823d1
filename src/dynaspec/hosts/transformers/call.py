"""``generate``: Transformers' assisted generation with draft lengths chosen at run time.

Transformers' generation calls methods of the model it generates with. Where one of them has to do something else, it is
given a *view* of the model: an instance of a subclass of the model's class that overrides the method and shares the
model's modules, parameters, hooks and configuration. The model itself stays as it is, and nobody else sees the view.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationMixin

from dynaspec.contract.errors import ConfigError, RequestError
from dynaspec.control.config import SpeculativeConfig
from dynaspec.observe.stats import SpecStats

from .calibrate import measure_costs
from .controlled import ControlledGenerator, Request
from .draft_loop import DraftLoop, DraftsInLoop, grown
from .drafters import AssistantDrafter, Drafter, PromptLookup, SuffixLookup, TextLookup
from .session import CLOCK, SESSIONS, Session
from .setup import EARLY_EXIT, EXIT_KEY, PROMPT_LOOKUP, TEXT_LOOKUP, Setup, resolve_setup


@cache
def _view_class(mixin: type, model_class: type) -> type:
    """Once for each class of models. It keeps the class's name, which Transformers looks at."""
    names = {name: getattr(model_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(model_class.__name__, (mixin, model_class), names)


def view_of(model: Any, mixin: type, **attributes: Any) -> Any:
    """``model`` with the methods of ``mixin`` before its own.

    Args:
        attributes: of the view alone. Others are those that the model has at this moment.
    """
    model_class: type = type(model)
    view: Any = object.__new__(_view_class(mixin, model_class))
    view.__dict__.update(model.__dict__)
    view.__dict__.update(attributes)
    return view


class AsksController:
    """Mixed into the target's class: how many candidates there are is for a controller to say."""

    call: Call

    def _get_candidate_generator(self, **prepared: Any) -> Any:
        return self.call.candidate_generator(super()._get_candidate_generator, prepared)  # type: ignore[misc]  # of the class mixed into


class Call:
    """Models such as Whisper decode several texts in one call, one after the other."""

    def __init__(self, model: Any, session: Session, setup: Setup, stats: SpecStats | None) -> None:
        """
        Args:
            model: the target.
            stats: the caller's own, added to beside the session's.
        """
        self._model = model
        self._session = session
        self._setup = setup
        self._stats = (session.stats,) if stats is None else (session.stats, stats)
        self._current: ControlledGenerator | None = None

    def generate(self, inputs: torch.Tensor | None, assistant: Any, generation: Mapping[str, Any]) -> Any:
        """What Transformers' ``generate`` returns."""
        arguments = dict(generation)
        if assistant is not None:
            arguments["assistant_model"] = _drafting(assistant)
        if self._setup.source == EARLY_EXIT:
            arguments[EXIT_KEY] = self._setup.config.assistant_early_exit
        if self._setup.source == TEXT_LOOKUP:
            _ask_for_lookup(arguments, self._setup.config.longest_draft)
        return view_of(self._model, AsksController, call=self).generate(inputs, **arguments)

    def finish(self) -> None:
        """Nothing more comes of the text that was decoded last."""
        current, self._current = self._current, None
        if current is not None:
            current.finish()

    def candidate_generator(self, theirs: Callable[..., Any], prepared: Mapping[str, Any]) -> ControlledGenerator:
        """The generator for a text that Transformers has just prepared.

        Args:
            theirs: makes Transformers' own, from ``prepared``.

        Raises:
            RequestError: more than one sequence.
        """
        self.finish()
        text, generation_config = prepared["input_ids"], prepared["generation_config"]
        if text.shape[0] != 1:
            raise RequestError(
                f"the batch has {text.shape[0]} sequences; expected one, as Transformers assists one at a time"
            )
        inputs = prepared["model_kwargs"]
        drafters = self._drafters(theirs, prepared)
        assistant = drafters[0] if isinstance(drafters[0], AssistantDrafter) else None
        if prepared.get("assistant_tokenizer") is not None:
            assistant = None  # it would have to read the whole text anew for every trial
        controller = self._session.controller(
            self._setup, lambda: measure_costs(self._model, inputs, text, assistant, CLOCK)
        )
        self._current = ControlledGenerator(
            request=Request(
                id=next(self._session.requests),
                max_length=generation_config.max_length,
                temperature=float(generation_config.temperature or 1.0) if generation_config.do_sample else 0.0,
                cached=inputs["past_key_values"].get_seq_length(),
            ),
            drafters=drafters,
            controller=controller,
            limits=self._setup.limits,
            steps=self._session.steps,
            stats=self._stats,
            clock=CLOCK,
        )
        return self._current

    def _drafters(self, theirs: Callable[..., Any], prepared: Mapping[str, Any]) -> list[Drafter]:
        """In the order of the limits' proposers: an assistant before the lookups beside it."""
        setup = self._setup
        longest = setup.config.longest_draft
        if setup.source == PROMPT_LOOKUP:
            return [PromptLookup(theirs(**prepared), longest)]
        drafters: list[Drafter] = [] if setup.source == TEXT_LOOKUP else [self._assistant(theirs, prepared)]
        if setup.config.lookup is not None:
            drafters.append(TextLookup(*setup.config.lookup, longest))
        if setup.config.suffix is not None:
            drafters.append(SuffixLookup(setup.config.suffix, longest, self._session.answers(setup.config.suffix)))
        return drafters

    def _assistant(self, theirs: Callable[..., Any], prepared: Mapping[str, Any]) -> AssistantDrafter:
        assistant: Any = prepared.get("assistant_model")
        if self._setup.source == EARLY_EXIT:
            # Transformers makes the model itself the assistant: the one whose method this is.
            assistant = _drafting(self._model)
            theirs = assistant._get_candidate_generator
        assistant.draft_loop = DraftLoop()
        both = self._model.config.is_encoder_decoder

        def make(text: torch.Tensor) -> Any:
            inputs = grown(prepared["model_kwargs"], text.shape[1], both)
            return theirs(**{**prepared, "input_ids": text, "model_kwargs": inputs})

        return AssistantDrafter(make, assistant.draft_loop)


def _drafting(assistant: Any) -> Any:
    """A view of the assistant that drafts in a loop of ours, as many tokens as it is told."""
    config = copy.deepcopy(assistant.generation_config)
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return view_of(assistant, DraftsInLoop, generation_config=config, draft_loop=DraftLoop())


def _ask_for_lookup(arguments: dict[str, Any], tokens: int) -> None:
    """Makes Transformers decode with candidates, though it does not look them up itself."""
    given = arguments.get("generation_config")
    if given is None:
        arguments["prompt_lookup_num_tokens"] = tokens
    else:
        config = copy.deepcopy(given)
        config.prompt_lookup_num_tokens = tokens
        arguments["generation_config"] = config


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
