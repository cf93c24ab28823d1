"""Counts the tokens of one HTTP request."""

from __future__ import annotations

from dynaspec.contract.outputs import RequestOutput

from .protocol.usage import PromptTokensDetails, Usage


class UsageCounter:
    """Sums over prompts and continuations, whether outputs come whole or in deltas.

    Args:
        outputs_count: whether output tokens are counted; not if none was asked for.
    """

    def __init__(self, *, outputs_count: bool = True) -> None:
        self._outputs_count = outputs_count
        self._prompts: dict[int, tuple[int, int]] = {}
        """(tokens, of which cached) by prompt."""
        self._completion_tokens = 0

    def add(self, prompt: int, output: RequestOutput) -> None:
        """What is new."""
        self._prompts[prompt] = (len(output.prompt_token_ids), output.num_cached_tokens)
        if self._outputs_count:
            self._completion_tokens += sum(len(one.token_ids) for one in output.outputs)

    def total(self) -> Usage:
        """All so far."""
        prompt_tokens = sum(tokens for tokens, _ in self._prompts.values())
        cached = sum(cached for _, cached in self._prompts.values())
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )
