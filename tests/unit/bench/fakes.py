"""A decoder that needs no model."""

from __future__ import annotations

from dynaspec.contract.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dynaspec.observe.counts import SpecCounts


class FakeDecoder:
    """Continues every prompt with the next integers; ``wrong`` is the call whose first output is off by one."""

    def __init__(self, drafted: int = 0, wrong: int | None = None) -> None:
        self.calls = 0
        self._drafted = drafted
        self._wrong = wrong
        self._counts = SpecCounts()

    def generate(self, prompts, sampling_params, /):
        outputs = []
        for i, prompt in enumerate(prompts):
            first = prompt["prompt_token_ids"][-1] + 1 + (self.calls == self._wrong and i == 0)
            tokens = tuple(range(first, first + sampling_params.max_tokens))
            metrics = RequestMetrics(
                steps=len(tokens) - self._drafted, drafted=2 * self._drafted, accepted=self._drafted
            )
            completion = CompletionOutput(index=0, text="", token_ids=tokens, metrics=metrics)
            outputs.append(RequestOutput(str(i), None, tuple(prompt["prompt_token_ids"]), (completion,), True))
        self.calls += 1
        self._counts += SpecCounts(
            request_steps=4, emitted=6, drafts=2, draft_emitted=4, draft_tokens=4, accepted=2, accepted_per_pos=(2,)
        )
        return outputs

    def stats(self):
        return self._counts
