"""vLLM's objects as the driver's plain values. Attributes are read, nothing is imported and nothing changed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from .settings import VllmSpeculation
from .step import Row, Verified
from .told import KEY

logger = logging.getLogger(__name__)

_WISH = "num_speculative_tokens"


def speculation_of(vllm_config: Any) -> VllmSpeculation:
    """What vLLM's configuration says of speculation, which it must have."""
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    return VllmSpeculation(
        method=spec.method,
        longest=spec.num_speculative_tokens,
        model=spec.model,
        target=vllm_config.model_config.model,
        lookup=None if spec.prompt_lookup_max is None else (spec.prompt_lookup_min, spec.prompt_lookup_max),
        table=tuple(tuple(entry) for entry in spec.num_speculative_tokens_per_batch_size or ()),
        parallel=spec.parallel_drafting,
        runner_v2=vllm_config.use_v2_model_runner,
        on_cpu=vllm_config.device_config.device_type == "cpu",
        asynchronous=bool(vllm_config.scheduler_config.async_scheduling),
        ranks=parallel.data_parallel_size,
        rank=parallel.data_parallel_rank,
    )


def drafter_length(vllm_config: Any) -> int | None:
    """Tokens up to which the drafter runs for a batch; beyond, it drafts for nobody. None = each request by itself."""
    if vllm_config.use_v2_model_runner:
        return None
    spec = vllm_config.speculative_config
    draft = spec.draft_model_config
    own = None if draft is None else draft.max_model_len
    longest = vllm_config.model_config.max_model_len if own is None else own
    return int(longest - spec.num_speculative_tokens - (spec.method == "dflash"))


def rows_of(
    requests: Mapping[str, Any], output: Any, max_model_len: int, wish: Callable[[Any], int | None]
) -> list[Row]:
    """The requests of a step that vLLM has just put together, before it counts the step's tokens as computed.

    Args:
        requests: vLLM's, by id.
        output: ``SchedulerOutput``.
        wish: most tokens that a request wants drafted; None = it does not say.
    """
    drafts = output.scheduled_spec_decode_tokens
    return [
        _row(requests[request], count, len(drafts.get(request, ())), max_model_len, wish(requests[request]))
        for request, count in output.num_scheduled_tokens.items()
    ]


def _row(request: Any, count: int, drafts: int, max_model_len: int, wish: int | None) -> Row:
    length = request.num_computed_tokens + count - drafts + 1
    space = max_model_len - length
    left = min(request.max_tokens - (length - request.num_prompt_tokens), space)
    params = request.sampling_params
    return Row(
        id=request.request_id,
        rows=count,
        drafts=drafts,
        computed=request.num_computed_tokens,
        decoding=count == 1 + drafts and request.num_output_tokens + request.num_output_placeholders > 0,
        goes_on=request.num_computed_tokens + count >= request.num_tokens + request.num_output_placeholders,
        length=length,
        room=max(0, left - 1),
        max_draft=wish,
        temperature=0.0 if params is None else params.temperature,
        space=max(0, space - 1),
    )


def wish_of(extra_args: Mapping[str, Any] | None) -> int | None:
    """How many tokens a request wants drafted at most: ``{"dynaspec": {"num_speculative_tokens": 2}}``, the inner part
    as JSON text where only that can be sent. None = it does not say, or not so that it can be understood, which is
    logged.
    """
    told = None if extra_args is None else extra_args.get(KEY)
    if told is None:
        return None
    try:
        wish = (json.loads(told) if isinstance(told, str) else told).get(_WISH)
    except (AttributeError, json.JSONDecodeError):
        logger.warning("a request's %s is %r; expected a mapping with %s", KEY, told, _WISH)
        return None
    if wish is None or (isinstance(wish, int) and not isinstance(wish, bool) and wish >= 0):
        return None if wish is None else int(wish)
    logger.warning("a request's %s is %r; expected an integer of at least 0", _WISH, wish)
    return None


def sampled_of(output: Any, ran: Any) -> dict[str, int]:
    """Tokens that the target agreed to, by request, before vLLM cuts them at a stop.

    Args:
        output: ``SchedulerOutput``.
        ran: ``ModelRunnerOutput``.
    """
    tokens, index = ran.sampled_token_ids, ran.req_id_to_index
    if not tokens:
        return {}
    return {request: len(tokens[index[request]]) for request in output.num_scheduled_tokens if request in index}


def verified_of(output: Any, sampled: Mapping[str, int], told: Mapping[int, Any]) -> dict[str, Verified]:
    """What came of a step, of the requests that got something out of it.

    Args:
        output: ``SchedulerOutput``.
        sampled: see ``sampled_of``.
        told: ``EngineCoreOutputs`` by client.
    """
    invalid = output.num_invalid_spec_tokens or {}
    return {
        out.request_id: Verified(sampled[out.request_id], len(out.new_token_ids), invalid.get(out.request_id, 0))
        for client in told.values()
        for out in client.outputs
        if out.new_token_ids and sampled.get(out.request_id)
    }
