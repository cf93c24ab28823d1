"""One request's parameters as vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dynaspec.contract.errors import RequestError
from dynaspec.contract.sampling_params import SamplingParams

from .told import KEY

SAME = (
    *("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "max_tokens", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "seed", "logprobs", "prompt_logprobs", "detokenize"),
    "skip_special_tokens",
)
"""Parameters with vLLM's names and meaning."""
OURS = ("truncate_prompt_tokens", "speculation_metrics")
"""Parameters that are carried out here, before and after vLLM."""
TRANSLATED = ("structured_outputs", "output_kind", "max_draft_tokens")
REFUSED: Mapping[str, str] = {
    "expected_acceptance": "vLLM's requests have no place for it",
}
"""Parameters that do not hold under vLLM, and why."""

_NO_SEED = -1
"""vLLM's word for None."""
_NOT_WHILE_SPECULATING = {"min_p": 0.0, "logit_bias": None}
"""Parameters that vLLM does not have together with speculation, and values that ask for nothing."""


def vllm_params(params: SamplingParams, *, speculates: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``SamplingParams``; those of enumerations and of structured outputs by their values.

    Args:
        speculates: whether vLLM drafts at all.

    Raises:
        RequestError: a parameter that vLLM cannot honour.
    """
    for name, why in REFUSED.items():
        if getattr(params, name) is not None:
            raise RequestError(f"{name} is {getattr(params, name)!r}; expected None, as {why}")
    if params.seed == _NO_SEED:
        raise RequestError("seed is -1, which means none to vLLM; expected another number")
    for name, nothing in _NOT_WHILE_SPECULATING.items() if speculates else ():
        if getattr(params, name) not in (nothing, {}):
            raise RequestError(
                f"{name} is {getattr(params, name)!r}; expected {nothing!r}, as vLLM does not have it together with "
                "speculation"
            )
    values = {name: _plain(getattr(params, name)) for name in SAME}
    values["output_kind"] = params.output_kind.name
    if params.structured_outputs is not None:
        form = asdict(params.structured_outputs)
        values["structured_outputs"] = {name: _plain(value) for name, value in form.items() if value is not None}
    if params.max_draft_tokens is not None:
        values["extra_args"] = {KEY: {"num_speculative_tokens": params.max_draft_tokens}}
    return values


def _plain(value: Any) -> Any:
    """Lists and dictionaries, as vLLM sends parameters to another process."""
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value
