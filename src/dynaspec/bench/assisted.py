"""Transformers' models behind the interface of ``LLM``, so that what measures an engine measures them too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import transformers

from dynaspec.contract.errors import CheckpointError, ConfigError
from dynaspec.contract.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.hosts.transformers import Session, generate
from dynaspec.observe.counts import SpecCounts


class Assisted:
    """A target and the assistant that drafts for it, loaded once for all policies.

    Args:
        model: checkpoint.
        drafter: the assistant's; None = drafts are looked up.
        dtype: None = float32 on a CPU, where rounding would otherwise decide about tokens; else the checkpoint's.
        device: None = a GPU, if there is one.

    Raises:
        CheckpointError: Transformers cannot load one of them.
    """

    def __init__(self, model: str, drafter: str | None, *, dtype: str | None = None, device: str | None = None) -> None:
        transformers.utils.logging.disable_progress_bar()
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        kind = dtype or ("float32" if place == "cpu" else "auto")
        self.target = _loaded(model, kind, place)
        self.assistant = None if drafter is None else _loaded(drafter, kind, place)
        self.tokenizer = Tokenizer(model)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a text, prompt included."""
        return int(self.target.config.max_position_embeddings)

    def decoder(self, speculation: Mapping[str, Any] | None, *, decision_log: Path | None = None) -> AssistedDecoder:
        """Decodes under a policy.

        Args:
            speculation: see ``hosts.transformers.call``; None = Transformers' plain ``generate``.
        """
        return AssistedDecoder(self, speculation, decision_log)


class AssistedDecoder:
    """One policy, which learns from call to call."""

    def __init__(self, pair: Assisted, speculation: Mapping[str, Any] | None, decision_log: Path | None) -> None:
        self._pair = pair
        self._speculation = speculation
        self._session = Session(decision_log=decision_log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._pair.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of a text, prompt included."""
        return self._pair.max_model_len

    def close(self) -> None:
        """Writes out the decision log."""
        self._session.close()

    def stats(self) -> SpecCounts:
        """Totals of all calls; nothing for plain decoding."""
        return self._session.stats.snapshot()

    def generate(
        self, prompts: Sequence[Mapping[str, object]], sampling_params: SamplingParams, /
    ) -> list[RequestOutput]:
        """One prompt after the other.

        Raises:
            ConfigError: a sampling parameter that is not carried over.
        """
        arguments = generation_of(sampling_params)
        outputs = []
        for number, prompt in enumerate(prompts):
            given = prompt["prompt_token_ids"]
            if not isinstance(given, Sequence):
                raise ConfigError(f"the prompt is {given!r}; expected token ids")
            before = self.stats()
            tokens = self._continued(list(given), arguments)
            metrics = _metrics(self.stats() - before)
            completion = CompletionOutput(0, "", tokens, finish_reason="length", metrics=metrics)
            outputs.append(RequestOutput(str(number), None, tuple(given), (completion,), finished=True))
        return outputs

    def _continued(self, prompt: list[int], arguments: Mapping[str, Any]) -> tuple[int, ...]:
        text = torch.tensor([prompt], device=self._pair.target.device)
        common = {"attention_mask": torch.ones_like(text), **arguments}
        if self._speculation is None:
            whole = self._pair.target.generate(text, **common)
        else:
            whole = generate(
                self._pair.target,
                text,
                assistant_model=None if self._speculation.get("method") == "ngram" else self._pair.assistant,
                speculative_config=self._speculation,
                session=self._session,
                **common,
            )
        return tuple(whole[0, len(prompt) :].tolist())


def generation_of(params: SamplingParams) -> dict[str, Any]:
    """Arguments of ``generate`` for dynaspec's parameters.

    Raises:
        ConfigError: parameters that mean something else there.
    """
    arguments: dict[str, Any] = {"max_new_tokens": params.max_tokens, "do_sample": not params.greedy}
    if params.ignore_eos:
        arguments["eos_token_id"] = None
    if not params.greedy:
        arguments |= {"temperature": params.temperature, "top_p": params.top_p, "top_k": max(0, params.top_k)}
    return arguments


def _loaded(name: str, dtype: str, device: str) -> Any:
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval().to(device)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"Transformers cannot load {name!r}: {reason}") from error


def _metrics(counts: SpecCounts) -> RequestMetrics:
    return RequestMetrics(
        steps=counts.request_steps,
        drafts=counts.drafts,
        drafted=counts.draft_tokens,
        verified=counts.verified,
        accepted=counts.accepted,
        draft_emitted=counts.draft_emitted,
    )
