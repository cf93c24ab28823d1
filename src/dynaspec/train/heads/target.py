"""The frozen target: its hidden states, and the parts of it that a head shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dynaspec.contract.errors import ConfigError
from dynaspec.model.gguf.transformers import transformers_config, transformers_model
from dynaspec.train.heads.vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True)
class States:
    """What the target thought along a text: ``aux`` [length − 1, aux_width], ``last`` [chains, hidden] (both in the
    target's dtype) and ``mass`` [chains] float32; see :class:`dynaspec.train.heads.batch.Example`."""

    aux: Tensor
    last: Tensor
    mass: Tensor


def read_config(model: str) -> dict[str, Any]:
    """The target's configuration; ``model`` is a checkpoint folder, a GGUF file or a hub id.

    Raises:
        ConfigError: there is none.
        CheckpointError: a GGUF file cannot be read.
    """
    try:
        config = transformers_config(Path(model)) if Path(model).is_file() else AutoConfig.from_pretrained(model)
        fields: dict[str, Any] = config.get_text_config().to_dict()
        return fields
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: got {model!r}, expected a checkpoint folder, GGUF file or hub id ({error})"
        ) from error


class Target:
    """A causal language model in ``dtype`` that is only read."""

    def __init__(self, model: str, dtype: torch.dtype, device: torch.device) -> None:
        """
        Raises:
            ConfigError: there is no such model.
            CheckpointError: a GGUF file cannot be read.
        """
        try:
            if Path(model).is_file():
                loaded = transformers_model(Path(model), dtype)
            else:
                loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
            self._model = loaded.to(device).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model: got {model!r}, expected a checkpoint folder, GGUF file or hub id ({error})"
            ) from error
        self._model.requires_grad_(False)
        self._device = device

    @property
    def embedding(self) -> Tensor:
        """[vocab, hidden]."""
        weight: Tensor = self._model.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Tensor:
        """[vocab, hidden]."""
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight

    @property
    def norm(self) -> Tensor | None:
        """[hidden], the final norm's weight, where there is one under the usual name."""
        weight = getattr(getattr(self._model.base_model, "norm", None), "weight", None)
        return weight if isinstance(weight, Tensor) else None

    @torch.no_grad()
    def hidden(self, tokens: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """For ``tokens`` [length]: the states ``layers`` (see ``HeadShape``) side by side, and the final state."""
        out = self._model.base_model(
            input_ids=tokens[None].to(self._device), output_hidden_states=True, use_cache=False
        )
        states = (*out.hidden_states, out.last_hidden_state)  # of n layers, the n-th is normed already and never read
        return torch.cat([states[k][0] for k in layers], dim=-1), out.last_hidden_state[0]

    @torch.no_grad()
    def states(self, tokens: Tensor, chains: int, layers: tuple[int, ...], vocabulary: DraftVocabulary) -> States:
        """States of a conversation ``tokens`` [length] whose last ``chains`` tokens are to be drafted."""
        aux, last = self.hidden(tokens[:-1], layers)
        last = last[len(last) - chains :]
        scores = last @ self.head.T
        everything = torch.logsumexp(scores.float(), dim=-1)
        inside = torch.logsumexp(scores[:, vocabulary.ids.to(scores.device)].float(), dim=-1)
        return States(aux, last, (inside - everything).exp())


def channel_scale(aux: Tensor) -> Tensor:
    """[aux_width] float32: root mean square of every channel of ``aux`` [rows, aux_width].

    Layers differ tenfold in scale and single channels more; what reads them learns faster if they do not. The
    division is folded into its weight afterwards. A channel that hardly moves is kept from blowing up.
    """
    squares = aux.float().square()
    # The first position's states are a hundredfold in many models; medians of few rows would be noisy, so cap instead.
    cap = squares.mean(dim=0) + 1e-12
    scale = torch.minimum(squares, 10 * cap).mean(dim=0).sqrt()
    return scale.clamp_min(0.05 * float(scale.mean()))


def first_id(config: Mapping[str, Any]) -> int | None:
    """The id that texts begin with according to ``config``: its first token, else its last."""
    given = config.get("bos_token_id")
    return int(given) if given is not None else next(iter(eos_ids(config)), None)


def eos_ids(config: Mapping[str, Any]) -> list[int]:
    """Ids that end a text according to ``config``, possibly none."""
    given = config.get("eos_token_id")
    return [] if given is None else [given] if isinstance(given, int) else list(given)
