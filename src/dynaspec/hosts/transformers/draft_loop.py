"""Drafting with an assistant in Transformers: prepared once a request, then one model pass a token.

Transformers' candidate generators call ``generate`` of the assistant for every draft, and preparing it takes longer
than the passes of a small assistant. What it prepares (processors, inputs, masks) stays the same from draft to draft
but for what the candidate generator itself hands over, so it is asked for once, through ``custom_generate``. The loop
also notes what the assistant says of its tokens, and ends a draft where the plan's rule says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    GenerationMixin,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
)
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)

from dynaspec.contract.step import StopRule
from dynaspec.propose.ngram import REPEAT_MATCH, REPEAT_WEIGHT, ahead, repeat_bonus
from dynaspec.propose.stopping import stop_mask
from dynaspec.sampling import ops

_HOST = torch.device("cpu")
_ROW = np.zeros(1, dtype=np.int64)
_GROWING = (
    *("past_key_values", "attention_mask", "decoder_attention_mask", "position_ids", "decoder_position_ids"),
    *("token_type_ids", "cross_attention_mask", "image_attention_mask"),
)
"""Inputs that the candidate generator keeps at the length of the text."""


def grown(inputs: Mapping[str, Any], length: int, is_encoder_decoder: bool) -> dict[str, Any]:
    """Masks, positions and token types for a text of ``length``, whatever length they were prepared for."""
    longer = _prepare_attention_mask(dict(inputs), length, is_encoder_decoder)
    longer = _prepare_position_ids(longer, length, is_encoder_decoder)
    result: dict[str, Any] = _prepare_token_type_ids(longer, length)
    return result


class DraftSignals:
    """Confidence and signal of one draft's tokens, one after the other; see ``contract.step.DraftView``."""

    def __init__(self, rule: StopRule | None, depth: int, text: torch.Tensor) -> None:
        """
        Args:
            text: [1, L] committed tokens, as the assistant reads them.
        """
        self.confidence: list[float] = []
        self.signal: list[float] = []
        self.repeat_bonus: list[float] = []
        self.stopped = False
        """The rule ended the draft before its depth."""
        self._depth = depth
        self._signal = "confidence" if rule is None else rule.signal
        self._mask = stop_mask(rule, np.array([depth], dtype=np.int64), _HOST)
        self._draft = np.zeros(depth, dtype=np.int64)
        # On a GPU the host would have to wait for the text.
        repeat_bonuses = self._signal == "survival" and text.device.type == "cpu"
        self._text = text[0].numpy().astype(np.int32) if repeat_bonuses else None

    def add(self, token: int, probability: torch.Tensor, lead: torch.Tensor, scores: torch.Tensor) -> bool:
        """Takes in a drafted token; returns whether to go on drafting.

        Args:
            probability, lead: [1] of the largest of the assistant's logits, see ``sampling.ops.leaders``.
            scores: [1, V] the logits after all processors, from which the token was drawn.
        """
        if self._signal == "token_prob":
            # That of the drawn token under what it was drawn from, as Transformers has it.
            value = float(scores.softmax(-1)[0, token])
        else:
            value = float(probability[0])
        self.confidence.append(value)
        if self._signal == "survival":
            value = self._weigh(token, ahead(float(lead[0]), float(probability[0])))
        done = len(self.confidence)
        self._mask.update(done, _ROW, torch.tensor([value], dtype=torch.float32))
        going_on = bool(self._mask.running(done).size)
        self.stopped = not going_on and done < self._depth
        return going_on

    def _weigh(self, token: int, ahead_by: float) -> float:
        position = len(self.signal)
        self._draft[position] = token
        own = 0.0
        if self._text is not None:
            own = REPEAT_WEIGHT * repeat_bonus(self._text, self._text.size, self._draft, position, REPEAT_MATCH)
        self.signal.append(ahead_by + own)
        self.repeat_bonus.append(own)
        return self.signal[-1]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What Transformers made of the first draft's arguments."""

    processors: LogitsProcessorList
    sample: bool
    end_tokens: frozenset[int]
    inputs: Mapping[str, Any]

    def at(self, given: Mapping[str, Any], length: int, is_encoder_decoder: bool) -> dict[str, Any]:
        """The model's inputs for another draft, behind a text of ``length``.

        A mask that was dropped, as nothing is padding, stays dropped.
        """
        inputs = dict(self.inputs)
        inputs.update({name: given[name] for name in _GROWING if name in given and inputs.get(name) is not None})
        return grown(inputs, length, is_encoder_decoder)

    def draw(self, text: torch.Tensor, logits: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, int]:
        """A token, and the scores [1, V] it was drawn from.

        Args:
            logits: [1, V] float32.
            largest: [1] the token with the largest logit.
        """
        if not self.processors and not self.sample:
            return logits, int(largest)
        scores = self.processors(text, logits.clone())
        drawn = torch.multinomial(scores.softmax(-1), 1)[0] if self.sample else ops.argmax(scores)
        return scores, int(drawn)


class DraftLoop:
    """Drafts with one assistant, for one request."""

    def __init__(self) -> None:
        self.rule: StopRule | None = None
        """When the next draft ends early."""
        self.signals: DraftSignals | None = None
        """Of the latest draft; None = the assistant was not run."""
        self.rows_per_pass: tuple[int, ...] = ()
        """Of the latest draft."""
        self._prepared: Prepared | None = None
        self._read: int | None = None
        self._depth = 0
        self._output: Any = None

    def begin(self, rule: StopRule | None, read: int | None) -> None:
        """A draft is about to be asked for.

        Args:
            read: tokens of the text that the assistant has read, from its beginning; what it has read beyond was
                rejected. None = the candidate generator sees to it.
        """
        self.rule, self._read, self.signals, self.rows_per_pass = rule, read, None, ()

    def begin_anew(self) -> None:
        """Another candidate generator begins: what was prepared holds the KV of the one before."""
        self._prepared = None

    def generate(self, model: Any, prepare: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """What ``model.generate(**given)`` returns to a candidate generator.

        Args:
            model: the assistant.
            prepare: its own ``generate``.
        """
        self._depth = given["max_new_tokens"]
        _forget(given.get("past_key_values"), self._read)
        # A least length becomes a processor that counts from this draft's first token.
        lasting = type(model).generates_as_usual and not given["min_new_tokens"]
        if self._prepared is not None and lasting:
            both = model.config.is_encoder_decoder
            text = given["decoder_input_ids" if both else "input_ids"]
            self._draft(model, text, self._prepared, self._prepared.at(given, text.shape[1], both))
        else:
            prepare(**given, custom_generate=self._with_prepared)
            self._prepared = self._prepared if lasting else None
        return self._output

    def _with_prepared(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **inputs: Any,
    ) -> Any:
        """The decoding method that Transformers calls with what it has prepared."""
        end = generation_config._eos_token_tensor
        self._prepared = Prepared(
            processors=_acting(logits_processor, text_length=input_ids.shape[1]),
            sample=bool(generation_config.do_sample),
            end_tokens=frozenset() if end is None else frozenset(end.tolist()),
            inputs=inputs,
        )
        self._draft(model, input_ids, self._prepared, dict(inputs))
        return self._output

    def _draft(self, model: Any, text: torch.Tensor, prepared: Prepared, inputs: dict[str, Any]) -> None:
        """One pass a token, until the depth is reached, the rule says so, or the text ends."""
        signals = self.signals = DraftSignals(self.rule, self._depth, text)
        cache = inputs.get("past_key_values")
        end = text.shape[1]
        whole = torch.cat([text, text.new_zeros(1, self._depth)], dim=-1)
        all_scores, rows = [], [end - (0 if cache is None else cache.get_seq_length())]
        going_on = True
        while going_on:
            outputs = _forward(model, whole[:, :end], rows[-1], inputs)
            logits = outputs.logits[:, -1].to(dtype=torch.float32, device=text.device, copy=True)
            largest, probability, lead = ops.leaders(logits)
            scores, token = prepared.draw(whole[:, :end], logits, largest)
            whole[0, end] = token
            end += 1
            all_scores.append(scores)
            going_on = signals.add(token, probability, lead, scores) and token not in prepared.end_tokens
            if going_on:
                inputs = model._update_model_kwargs_for_generation(
                    outputs, inputs, is_encoder_decoder=model.config.is_encoder_decoder
                )
                rows.append(1)
        self.rows_per_pass = tuple(rows)
        kind = GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
        self._output = kind(
            sequences=whole[:, :end], scores=tuple(all_scores), past_key_values=outputs.get("past_key_values")
        )


class DraftsInLoop:
    """Mixed into an assistant's class: its ``generate`` is a loop of ours."""

    draft_loop: DraftLoop
    generates_as_usual: bool
    """``generate`` is not one of the model's class, which may prepare every draft otherwise."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.generates_as_usual = _own_generate(cls) is GenerationMixin.generate

    def generate(self, **given: Any) -> Any:
        """See ``DraftLoop.generate``."""
        return self.draft_loop.generate(self, super().generate, given)  # type: ignore[misc]  # of the class mixed into


def _own_generate(view_class: type) -> Any:
    return next(base.__dict__["generate"] for base in view_class.__mro__[2:] if "generate" in base.__dict__)


def _acting(processors: LogitsProcessorList, text_length: int) -> LogitsProcessorList:
    """Those that may change scores behind a text of this length: a least length that it has reached does not."""
    reached = [isinstance(one, MinLengthLogitsProcessor) and one.min_length <= text_length for one in processors]
    return LogitsProcessorList(one for one, idle in zip(processors, reached, strict=True) if not idle)


def _forget(cache: Any, kept: int | None) -> None:
    """Candidate generators take what was rejected out of the cache, but count on no step without a draft."""
    if cache is None or kept is None:
        return
    rejected = cache.get_seq_length() - kept
    if rejected > 0:
        cache.crop(-rejected)


def _forward(model: Any, sequence: torch.Tensor, rows: int, inputs: Mapping[str, Any]) -> Any:
    """A pass over the last ``rows`` tokens."""
    arguments = model.prepare_inputs_for_generation(
        sequence, next_sequence_length=rows, is_first_iteration=False, **inputs
    )
    return model(**arguments, return_dict=True)
