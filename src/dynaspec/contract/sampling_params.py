"""What a caller may ask of one request: how it is decoded, and what form its output must have. Names, defaults and
meaning are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from enum import Enum
from json import JSONDecodeError, dumps, loads
from typing import Any, Literal, NoReturn, get_args

from .errors import RequestError

_MAX_SEED = 2**63 - 1
_MAX_STOP_STRINGS = 64
_LISTS = ("allowed_token_ids", "bad_words", "stop_token_ids")
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")


SpeculationMetrics = Literal["off", "summary", "detailed"]
"""What a request's metrics report about its drafts: nothing; totals; also counts by position and by step."""


class RequestOutputKind(Enum):
    """What a streamed output carries."""

    CUMULATIVE = "cumulative"  # all text and tokens so far
    DELTA = "delta"  # what is new since the previous output
    FINAL_ONLY = "final_only"  # one output, at the end


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class SamplingParams:
    """Decoding parameters of one request; validated when built, and again, and copied, when a request is made of them.

    So they may be changed between requests, as vLLM's.

    Raises:
        RequestError: a value out of its range, or two values that contradict each other.
    """

    n: int = 1
    """Number of independent continuations of the prompt."""
    temperature: float = 1.0
    """0 = greedy."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 or −1 = all."""
    top_p: float = 1.0
    """Keep a token while the probability mass before it is < top_p."""
    min_p: float = 0.0
    """Keep tokens with at least min_p times the largest probability."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL, 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of a token that the output contains."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit once for each occurrence in the output."""
    logit_bias: Mapping[int, float] | None = None
    """Added to logits, by token id; each value within −100 … 100."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens may be produced; with ``structured_outputs`` see there."""
    bad_words: Sequence[str] | None = None
    """Strings whose token sequences may not be produced."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output must have.

    With ``allowed_token_ids`` and ``bad_words`` only what all of them allow is produced. If they leave no first token,
    the request is refused. If they leave none later, it ends with what it has: finish reason ``stop`` where the form is
    complete, else ``error`` with a sentence as the stop reason.
    """
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many output tokens."""
    max_tokens: int | None = 16
    """Most output tokens; None = as many as the model's length allows."""
    stop: str | Sequence[str] | None = None
    """The output ends before the first of these strings."""
    stop_token_ids: Sequence[int] | None = None
    """The output ends with any of these tokens."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    seed: int | None = None
    """Makes sampling a function of (prompt, parameters, seed) alone, with or without speculation."""
    logprobs: int | None = None
    """Report this many most probable tokens and the chosen one at each output position; −1 = all."""
    prompt_logprobs: int | None = None
    """The same for the prompt's positions."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    """Keep only the last this many prompt tokens."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    max_draft_tokens: int | None = None
    """Upper limit on this request's draft length; 0 = no speculation, None = the engine decides."""
    expected_acceptance: float | None = None
    """Share of drafted tokens this caller expects to be accepted, 0 … 1: where a learning policy starts for this
    request. A hint, never a limit; None = the policy uses what it has learned from others."""
    speculation_metrics: SpeculationMetrics = "summary"
    """What ``RequestMetrics`` reports about this request's drafts."""
    guided_decoding: InitVar[StructuredOutputsParams | None] = None
    """Older vLLMs' name of ``structured_outputs``."""
    spaces_between_special_tokens: InitVar[bool] = True
    """As vLLM has it, like the next ones; only the default."""
    logits_processors: InitVar[None] = None
    extra_args: InitVar[Mapping[str, Any] | None] = None
    flat_logprobs: InitVar[bool] = False
    skip_reading_prefix_cache: InitVar[bool | None] = None

    def __post_init__(
        self,
        guided_decoding: StructuredOutputsParams | None,
        spaces_between_special_tokens: bool,
        logits_processors: None,
        extra_args: Mapping[str, Any] | None,
        flat_logprobs: bool,
        skip_reading_prefix_cache: bool | None,
    ) -> None:
        if spaces_between_special_tokens is not True:
            _not_available("spaces_between_special_tokens", True, "text is what the tokenizer decodes")
        if logits_processors:
            _not_available("logits_processors", None, "requests cannot bring code")
        if extra_args:
            _not_available("extra_args", None, "there is nothing that they could set")
        if flat_logprobs:
            _not_available("flat_logprobs", False, "log-probabilities come as dictionaries")
        if skip_reading_prefix_cache:
            _not_available("skip_reading_prefix_cache", None, "the prefix cache is an option of the engine")
        if guided_decoding is not None:
            if self.structured_outputs is not None:
                raise RequestError("structured_outputs and guided_decoding are both given; expected one of them")
            object.__setattr__(self, "structured_outputs", guided_decoding)
        # Copied, so that the caller's later changes do not reach the engine.
        for name in _LISTS:
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        if not isinstance(self.stop, str):
            object.__setattr__(self, "stop", _tuple("stop", self.stop))
        object.__setattr__(self, "logit_bias", _by_token(self.logit_bias))
        self._check_kinds()
        self._check_ranges()
        self._check_lists()
        self._check_together()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def _check_kinds(self) -> None:
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; expected True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(f"output_kind is {self.output_kind!r}; expected a RequestOutputKind")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise RequestError(
                f"structured_outputs is a {type(self.structured_outputs).__name__}; expected StructuredOutputsParams"
            )
        if self.speculation_metrics not in get_args(SpeculationMetrics):
            raise RequestError(
                f"speculation_metrics is {self.speculation_metrics!r}; expected 'off', 'summary' or 'detailed'"
            )

    def _check_ranges(self) -> None:
        _integer("n", self.n, 1, 1024)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1, 2**31)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0; expected a number above 0 and at most 1")
        _number("min_p", self.min_p, 0.0, 1.0)
        # Less would take logits out of a float's range, and the drafter with them, for everybody.
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("min_tokens", self.min_tokens, 0, 2**31)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31)
        if self.seed is not None:
            _integer("seed", self.seed, -_MAX_SEED, _MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1, 2**31)
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, 2**31)
        if self.max_draft_tokens is not None:
            _integer("max_draft_tokens", self.max_draft_tokens, 0, 2**31)
        if self.expected_acceptance is not None:
            _number("expected_acceptance", self.expected_acceptance, 0.0, 1.0)

    def _check_lists(self) -> None:
        for token, bias in (self.logit_bias or {}).items():
            _integer("a key of logit_bias", token, 0, 2**31)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty; expected at least one token id, or None")
        for token in (*(self.allowed_token_ids or ()), *(self.stop_token_ids or ())):
            _integer("a token id", token, 0, 2**31)
        if len(self.stop_strings) > _MAX_STOP_STRINGS:
            raise RequestError(f"{len(self.stop_strings)} stop strings given; expected at most {_MAX_STOP_STRINGS}")
        for name, strings in (("stop", self.stop_strings), ("bad_words", self.bad_words or ())):
            for string in strings:
                if not isinstance(string, str) or not string:
                    raise RequestError(f"{name} holds {string!r}; expected non-empty strings")

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}; expected min_tokens ≤ max_tokens"
            )
        if self.stop_strings and not self.detokenize:
            raise RequestError("stop strings need text, but detokenize is False; expected detokenize=True or no stop")
        if self.greedy and self.n > 1:
            raise RequestError(f"n is {self.n} with temperature 0; expected n=1, as greedy continuations are all alike")


def _not_available(name: str, default: object, why: str) -> NoReturn:
    raise RequestError(f"{name} is not available, as {why}; expected {default!r}")


def _tuple(name: str, value: object) -> tuple[object, ...] | None:
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(f"{name} is {value!r}; expected a list")
    return tuple(value)


def _by_token(bias: object) -> dict[object, object] | None:
    """The keys of JSON objects are strings; token ids are integers."""
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias is {bias!r}; expected a mapping from token ids to numbers")
    return {int(k) if isinstance(k, str) and k.isascii() and k.isdigit() else k: v for k, v in bias.items()}


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}; expected an integer from {low} to {high}")


def _number(name: str, value: object, low: float, high: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # type: ignore[operator]  # false for NaN
        raise RequestError(f"{name} is {value!r}; expected a number from {low} to {high}")


_OUTPUT_FORMS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of ``json``, ``regex``, ``choice``, ``grammar`` and ``json_object``; validated when built.

    Only the form of these is checked here. What a schema, an expression or a grammar says is compiled when its request
    arrives, and refused then if it cannot be.

    Raises:
        RequestError: none of them or several, a value of the wrong kind, or an option that does not go with them.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as a mapping or as text; kept as text."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: Sequence[str] | None = None
    """The output is one of these strings."""
    grammar: str | None = None
    """A context-free grammar: in Lark's syntax with a rule ``start``, or in GBNF's with a rule ``root``."""
    json_object: bool | None = None
    """The output is a JSON object, whatever it holds."""
    whitespace_pattern: str | None = None
    """A regular expression of what may stand between the parts of JSON; None = any whitespace."""
    disable_any_whitespace: bool = False
    """No whitespace between the parts of JSON."""

    def __post_init__(self) -> None:
        given = [kind for kind in _OUTPUT_FORMS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; "
                f"expected exactly one of {', '.join(_OUTPUT_FORMS)}"
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if not isinstance(self.json_object, bool | None):
            raise RequestError(f"structured_outputs.json_object is {self.json_object!r}; expected True or False")
        self._check_whitespace()

    def _check_whitespace(self) -> None:
        if not isinstance(self.disable_any_whitespace, bool):
            raise RequestError(
                f"structured_outputs.disable_any_whitespace is {self.disable_any_whitespace!r}; expected True or False"
            )
        if self.whitespace_pattern is None and not self.disable_any_whitespace:
            return
        if self.json is None and not self.json_object:
            raise RequestError(
                "structured_outputs has whitespace_pattern or disable_any_whitespace without JSON; "
                "expected them with json or json_object only"
            )
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise RequestError(
                "structured_outputs has whitespace_pattern and disable_any_whitespace; expected at most one of them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """Older vLLMs' name of ``StructuredOutputsParams``.

    Args:
        backend: of no effect: there is only one grammar engine.
    """

    backend: InitVar[str | None] = None

    def __post_init__(self, backend: str | None) -> None:
        StructuredOutputsParams.__post_init__(self)


def _schema(schema: object) -> str:
    """The text of a schema: a mapping is written down, so that the caller's later changes do not reach the engine."""
    if isinstance(schema, str):
        _check_text("json", schema)
    try:
        text = schema if isinstance(schema, str) else dumps(schema, allow_nan=False)
        well_formed = isinstance(loads(text), dict | bool)
    except JSONDecodeError as error:
        raise RequestError(f"structured_outputs.json is not JSON: {error}") from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"structured_outputs.json holds what JSON cannot: {error}") from None
    except RecursionError:
        raise RequestError("structured_outputs.json is nested too deeply; expected fewer levels") from None
    if not well_formed or isinstance(schema, bool):
        raise RequestError(
            f"structured_outputs.json is {_shown(schema)}; expected a JSON schema, as a mapping or as text"
        )
    return text


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str | bytes) or not isinstance(choices, Sequence) or not choices:
        raise RequestError(f"structured_outputs.choice is {_shown(choices)}; expected a list of strings")
    for string in choices:
        _check_text("choice", string)
    return tuple(choices)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise RequestError(f"structured_outputs.{name} holds {_shown(value)}; expected non-empty text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"structured_outputs.{name} is not valid Unicode at character {error.start}; expected text"
        ) from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
