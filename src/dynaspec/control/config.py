"""What a user may configure about speculation."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import BY_PASSES, METHODS
from dynaspec.contract.step import TreeRule
from dynaspec.contract.tree import MAX_NODES, MAX_WIDTH, TokenTree

from .keys import (
    SUFFIX_KEYS,
    SYNTHETIC_LENGTH_KEY,
    SYNTHETIC_RATES_KEY,
    SuffixSettings,
    canonical,
    either,
    synthetic_rates,
)
from .planner import MAX_DRAFT_TOKENS
from .profile import Profile
from .resolve import DEFAULT_TREE_WIDTH, POLICIES, SCHEDULE_KEY, PolicyName, fill_in, resolve


@dataclass(frozen=True, slots=True)
class Expected:
    """Says in words what a field takes; the second half of its error message."""

    text: str


Method = Annotated[str, Expected(either(tuple(METHODS)))]
Policy = Annotated[PolicyName, Expected(either(POLICIES))]
Name = Annotated[Annotated[str, Field(min_length=1)] | None, Expected("a non-empty string")]
DraftLength = Annotated[
    int,
    Field(strict=True, ge=1, le=MAX_DRAFT_TOKENS),
    Expected(f"an integer from 1 to {MAX_DRAFT_TOKENS}"),
]
Count = Annotated[Annotated[int, Field(strict=True, ge=1)] | None, Expected("an integer of at least 1")]
CountOrZero = Annotated[Annotated[int, Field(strict=True, ge=0)] | None, Expected("an integer of at least 0")]
Depth = Annotated[Annotated[int, Field(strict=True, ge=2)] | None, Expected("an integer of at least 2")]
Factor = Annotated[
    Annotated[float, Field(strict=True, ge=0.0, allow_inf_nan=False)] | None, Expected("a number of at least 0")
]
Probability = Annotated[float, Field(strict=True, ge=0.0, le=1.0, allow_inf_nan=False)]
Gate = Annotated[Probability | None, Expected("a number from 0 to 1")]
Threshold = Annotated[Probability | Literal["auto"] | None, Expected("a number from 0 to 1, or 'auto'")]
ConfidenceScope = Annotated[Literal["batch_mean", "request"], Expected("'batch_mean' or 'request'")]
ConfidenceSignal = Annotated[Literal["confidence", "token_prob"], Expected("'confidence' or 'token_prob'")]
SampleMethod = Annotated[Literal["greedy", "probabilistic"], Expected("'greedy' or 'probabilistic'")]
Whole = Annotated[int, Field(strict=True)]
Ranges = Annotated[tuple[tuple[Whole, Whole, Whole], ...] | None, Expected("a list of ranges [low, high, k]")]
Ladder = Annotated[tuple[Whole, ...] | None, Expected("a list of draft lengths")]
RejectionMethod = Annotated[Literal["standard", "block", "synthetic"], Expected("'standard', 'block' or 'synthetic'")]
Rates = Annotated[
    Annotated[tuple[Probability, ...], Field(min_length=1)] | None, Expected("a list of numbers from 0 to 1")
]
Tokens = Annotated[
    Annotated[float, Field(strict=True, ge=1.0, allow_inf_nan=False)] | None, Expected("a number of at least 1")
]
TreePaths = Annotated[tuple[tuple[Whole, ...], ...] | None, Expected("a list of paths")]
TreeWidth = Annotated[
    Annotated[int, Field(strict=True, ge=1, le=MAX_WIDTH)] | None, Expected(f"an integer from 1 to {MAX_WIDTH}")
]
TreeNodes = Annotated[
    Annotated[int, Field(strict=True, ge=1, le=MAX_NODES)] | None, Expected(f"an integer from 1 to {MAX_NODES}")
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    Expected("'auto', 'float32', 'bfloat16' or 'float16'"),
]
OwnVocabulary = Annotated[
    Annotated[bool, Field(strict=True)] | Literal["tli", "slem"],
    Expected("true, false, 'tli' or 'slem'"),
]
Quantization = Annotated[Literal["int8", "int4"] | None, Expected("'int8', 'int4', or no quantization")]


class SpeculativeConfig(BaseModel):
    """A complete, consistent configuration: what the user left open has been decided when it is built.

    Keys, aliases and defaults are those of ``docs/policies.md``. Every key of vLLM's SpeculativeConfig is
    either a field here or refused by name.

    Raises:
        ConfigError: an unknown key, a value out of range, or keys that contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    method: Method
    """Who drafts."""
    model: Name = None
    """The draft model's or head's checkpoint: a folder or a Hugging Face name. None for ``ngram``."""
    revision: Name = None
    """The checkpoint's branch, tag or commit."""
    max_model_len: Count = None
    """Longest context, in tokens, that the drafter is used for; None = as far as drafter and target go."""
    dtype: Dtype = "auto"
    """The drafter's dtype; ``auto`` = the target's."""
    quantization: Quantization = None
    """Of the drafter's weights when they are loaded; None = as the target's."""
    use_heterogeneous_vocab: OwnVocabulary = False
    """The draft model has another tokenizer than the target. ``tli``, or true: it drafts the tokens that both have;
    ``slem``: any, whose text the target's tokenizer encodes."""
    assistant_lookbehind: Count = None
    """Of the draft model's tokens, how many are encoded anew with the text that follows them."""
    target_lookbehind: Count = None
    """The same of the target's, where drafted text is encoded."""
    assistant_early_exit: Count = None
    """For ``early_exit``: layers of the target that draft."""
    draft_sample_method: SampleMethod
    """``greedy``: drafts are the drafter's most probable tokens; ``probabilistic``: sampled from it."""
    prompt_lookup_max: CountOrZero = None
    """Longest n-gram looked up in the context; None or 0 = nothing is looked up."""
    prompt_lookup_min: Count = None
    """Shortest n-gram looked up."""
    suffix_decoding_max_tree_depth: Depth = None
    """Longest match and draft together, in tokens; None here and below = no suffix trees."""
    suffix_decoding_max_cached_requests: CountOrZero = None
    """Latest answers that are drafted from, whosever they are; 0 = a request's own text alone."""
    suffix_decoding_max_cached_tokens: CountOrZero = None
    """Tokens of these answers together, at most."""
    suffix_decoding_max_spec_factor: Factor = None
    """A draft has at most so many tokens for each token of its match."""
    suffix_decoding_min_token_prob: Gate = None
    """A draft ends before a token at which, by the counts, less than this share of its continuations is left."""
    num_speculative_tokens: DraftLength
    """k: the length (constant), the first length (heuristics) or the longest (all others)."""
    policy: Policy
    speculative_token_tree: TreePaths = None
    """The shape of all drafts, as paths of ranks (0: the drafter's first choice), in order of depth; for ``constant``.
    None = chains, or trees by the two keys below."""
    tree_width: TreeWidth = None
    """Most choices of the drafter behind a token; 1 = chains. None = chains for ``constant``, 4 for ``auto``, which
    lets branches grow where they pay."""
    tree_nodes: TreeNodes = None
    """Most tokens of a tree; None = ``tree_width`` · ``num_speculative_tokens``, 63 at most. ``constant`` drafts so
    many, the likeliest ones."""
    num_speculative_tokens_per_batch_size: Ranges = None
    """[low, high, k]: drafts have k tokens while low to high requests decode; for ``schedule``."""
    dynamic_config_path: Name = None
    """File of a goodput profile (``profile.Profile``); for ``goodput``, and a warm start for ``auto``."""
    draft_length_options: Ladder = None
    """Lengths that ``elastic`` chooses from, ascending."""
    kv_write_gating_threshold: Gate = None
    """The drafter keeps no KV of draft tokens with less confidence; 0 or None = of all."""
    disable_by_batch_size: Count = None
    """Plain decoding while more than this many requests decode; None = never."""
    draft_confidence_threshold: Threshold = None
    """Drafting stops after a token with less confidence; ``auto`` = fitted while running, 0 or None = off."""
    draft_confidence_scope: ConfidenceScope = "batch_mean"
    signal: ConfidenceSignal = "confidence"
    """``confidence``: the drafter's largest probability; ``token_prob``: that of the token it drew."""
    rejection_sample_method: RejectionMethod = "standard"
    """``block``: drawn drafts are verified as wholes, exact and accepting no fewer than ``standard``, token by token.
    ``synthetic``: acceptance is drawn at random, so the output means nothing; for performance work."""
    synthetic_acceptance_rates: Rates = None
    """For ``synthetic``: the chance that the first j tokens of a draft are all accepted, for every j."""
    synthetic_acceptance_length: Tokens = None
    """For ``synthetic``, instead of rates: mean tokens emitted by a step."""
    _profile: Profile | None = PrivateAttr(default=None)

    def __init__(self, **given: Any) -> None:
        named = canonical(given, self._keys())
        resolved = resolve(named)
        try:
            super().__init__(**resolved)
        except ValidationError as error:
            raise ConfigError(_sentence(error, named, resolved)) from None
        self._check_lookup()
        self._check_ladder()
        self._check_synthetic()
        if self.dynamic_config_path is not None:
            self._profile = Profile.load(self.dynamic_config_path)

    @classmethod
    def parse(
        cls,
        value: Mapping[str, Any] | str | SpeculativeConfig | None,
        environ: Mapping[str, str] | None = None,
    ) -> Self | None:
        """Builds a configuration from what an API or a command line was given.

        Args:
            value: keys and values, the same as JSON text, a finished configuration (returned as it is), or
                None (no speculation).
            environ: environment variables, which decide what ``value`` leaves open; None = none.

        Raises:
            ConfigError: one sentence that says what was given and what is expected.
        """
        if value is None or isinstance(value, cls):
            return value
        return cls(**fill_in(canonical(as_mapping(value), cls._keys()), environ or {}))

    @classmethod
    def given(cls, value: Mapping[str, Any] | str | SpeculativeConfig | None, defaults: Mapping[str, Any]) -> Any:
        """``value`` for ``parse``, with ``defaults`` for keys that it leaves open; an object is complete.

        Raises:
            ConfigError: see ``parse``.
        """
        if isinstance(value, cls):
            return value
        return dict(defaults) | canonical({} if value is None else as_mapping(value), cls._keys())

    @property
    def longest_draft(self) -> int:
        """The longest draft that the policy may ever ask for; heuristics grow beyond their start."""
        if self.policy in ("heuristic", "heuristic_transient"):
            return MAX_DRAFT_TOKENS
        if self.policy == "goodput" and self._profile is not None:
            return min(self.num_speculative_tokens, self._profile.max_num_speculative_tokens)
        if self.policy == "elastic" and self.draft_length_options is not None:
            return self.draft_length_options[-1]
        return self.num_speculative_tokens

    @property
    def tree(self) -> TreeRule | None:
        """How drafts of a constant size branch; None = they are chains, or ``auto`` decides."""
        if self.policy != "constant":
            return None
        if self.speculative_token_tree is not None:
            shape = TokenTree.parse(self.speculative_token_tree)
            return TreeRule(shape.width, shape=shape)
        return TreeRule(self.tree_width) if self.tree_width is not None and self.tree_width > 1 else None

    @property
    def most_nodes(self) -> int:
        """Most tokens of a draft, if it is a tree."""
        if self.speculative_token_tree is not None:
            return len(self.speculative_token_tree)
        width = self.tree_width or DEFAULT_TREE_WIDTH
        return self.tree_nodes or min(MAX_NODES, width * self.num_speculative_tokens)

    @property
    def profile(self) -> Profile | None:
        """What ``dynamic_config_path`` held when the configuration was built."""
        return self._profile

    @property
    def lookup(self) -> tuple[int, int] | None:
        """Shortest and longest n-gram that are looked up; None = nothing is."""
        return (self.prompt_lookup_min or 1, self.prompt_lookup_max) if self.prompt_lookup_max else None

    @property
    def suffix(self) -> SuffixSettings | None:
        """What suffix trees are kept by; None = there are none."""
        if self.suffix_decoding_max_tree_depth is None:
            return None
        return SuffixSettings(*(getattr(self, name) for name in SUFFIX_KEYS))

    @property
    def hybrid_lookup(self) -> bool:
        """Looked-up drafts compete with those of a model or head."""
        return self.method in BY_PASSES and (self.lookup is not None or self.suffix is not None)

    @property
    def synthetic_rates(self) -> tuple[float, ...] | None:
        """Unconditional acceptance per position, [num_speculative_tokens], non-increasing; None = drafts are tested.

        Positions beyond them, which heuristics can reach, are never accepted.
        """
        if self.rejection_sample_method != "synthetic":
            return None
        return synthetic_rates(
            self.synthetic_acceptance_rates, self.synthetic_acceptance_length, self.num_speculative_tokens
        )

    @classmethod
    def _keys(cls) -> tuple[str, ...]:
        return (*cls.model_fields, SCHEDULE_KEY)

    def _check_lookup(self) -> None:
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is not None and high is not None and low > high:
            raise ConfigError(f"prompt_lookup_min is {low} but prompt_lookup_max is {high}; expected min ≤ max")

    def _check_ladder(self) -> None:
        ladder = self.draft_length_options
        if ladder is not None and ladder[-1] > self.num_speculative_tokens:
            raise ConfigError(
                f"draft_length_options is {list(ladder)} but num_speculative_tokens is {self.num_speculative_tokens}; "
                "expected no longer draft than that"
            )

    def _check_synthetic(self) -> None:
        if self.rejection_sample_method == "synthetic":
            synthetic_rates(
                self.synthetic_acceptance_rates, self.synthetic_acceptance_length, self.num_speculative_tokens
            )
            return
        for name in (SYNTHETIC_RATES_KEY, SYNTHETIC_LENGTH_KEY):
            value = getattr(self, name)
            if value is not None:
                raise ConfigError(
                    f"{name} is {value!r} but rejection_sample_method is {self.rejection_sample_method!r}; expected no "
                    f"{name}, or 'synthetic'"
                )


def as_mapping(value: Any) -> Mapping[str, Any]:
    """A ``speculative_config`` that is no object yet, as keys and values.

    Raises:
        ConfigError: neither a mapping nor JSON text of one.
    """
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ConfigError(f"speculative_config is {value!r}, which is not JSON ({error.msg})") from None
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config is {value!r}; expected a mapping, or a JSON object")
    return given


def _sentence(error: ValidationError, named: Container[str], resolved: Mapping[str, Any]) -> str:
    """The first of the errors, if possible about a key that was given and not about one derived from it."""
    errors = error.errors(include_url=False)
    first = next((e for e in errors if e["loc"][0] in named), errors[0])
    name = str(first["loc"][0])
    metadata = SpeculativeConfig.model_fields[name].metadata
    expected = next(entry.text for entry in metadata if isinstance(entry, Expected))
    return f"{name} is {resolved[name]!r}; expected {expected}"
