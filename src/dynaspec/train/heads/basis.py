"""The frozen target, and what a run fixes before it trains: shape, draft vocabulary, scale of the states.

Kinds of heads that read the same hidden states can share it, and the states with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from dynaspec.contract.errors import ConfigError
from dynaspec.model.gguf.transformers import transformers_config, transformers_model
from dynaspec.train.run import write_atomically, write_text_atomically

from .conversations import Conversation
from .shape import DraftVocabulary, HeadShape, most_frequent

SCALE_CONVERSATIONS = 64


@dataclass(frozen=True, slots=True)
class States:
    """What the target thought along a text: ``aux`` [length − 1, aux_width], ``last`` [chains, hidden] (both in the
    target's dtype) and ``mass`` [chains] float32; see :class:`dynaspec.train.heads.head.Example`."""

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


class FrozenTarget:
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
    def device(self) -> torch.device:
        return self._device

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
        """For ``tokens`` […, length]: the states ``layers`` (see ``HeadShape``) side by side, and the final state."""
        texts = tokens.view(-1, tokens.shape[-1]).to(self._device)
        out = self._model.base_model(input_ids=texts, output_hidden_states=True, use_cache=False)
        states = (*out.hidden_states, out.last_hidden_state)  # of n layers, the n-th is normed already and never read
        aux = torch.cat([states[k] for k in layers], dim=-1)
        return aux.view(*tokens.shape, -1), out.last_hidden_state.view(*tokens.shape, -1)

    @torch.no_grad()
    def states(
        self,
        texts: Sequence[Tensor],
        chains: Sequence[int],
        layers: tuple[int, ...],
        vocabulary: DraftVocabulary,
    ) -> list[States]:
        """States of conversations [length] each, of which the last ``chains`` tokens are to be drafted; one pass."""
        padded = pad_sequence([tokens[:-1] for tokens in texts], batch_first=True)  # no text sees what comes after it
        aux, last = self.hidden(padded, layers)
        read = [last[i, len(t) - 1 - n : len(t) - 1] for i, (t, n) in enumerate(zip(texts, chains, strict=True))]
        mass = self._mass(torch.cat(read), vocabulary).split_with_sizes(list(chains))
        return [States(aux[i, : len(texts[i]) - 1], read[i], mass[i]) for i in range(len(texts))]

    def _mass(self, last: Tensor, vocabulary: DraftVocabulary) -> Tensor:
        scores = last @ self.head.T
        everything = torch.logsumexp(scores.float(), dim=-1)
        inside = torch.logsumexp(scores[:, vocabulary.ids.to(scores.device)].float(), dim=-1)
        return (inside - everything).exp()


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


@dataclass(frozen=True, slots=True)
class Basis:
    """``scale`` is [aux_width] float32; ``embedding`` and ``output`` [vocab, hidden], which may be the same tensor, and
    ``target_norm`` [hidden] are the target's, in its dtype."""

    shape: HeadShape
    vocabulary: DraftVocabulary
    scale: Tensor
    embedding: Tensor
    output: Tensor
    target_norm: Tensor | None

    def cast(self, dtype: torch.dtype) -> Basis:
        """The same with the target's matrices in ``dtype``."""
        embedding = self.embedding.to(dtype)
        output = embedding if self.output is self.embedding else self.output.to(dtype)
        return replace(self, embedding=embedding, output=output)


def choose_vocabulary(
    config: Mapping[str, Any], conversations: Sequence[Conversation], draft_vocab: int
) -> DraftVocabulary:
    """The tokens that the answers of ``conversations`` use most, for a target with Hugging Face's ``config``.

    Raises:
        ConfigError: there are no conversations, or the target's configuration lacks a size.
    """
    if not conversations:
        raise ConfigError("conversations: got none, expected some to take the draft vocabulary from")
    vocab = int(config["vocab_size"])
    answers = (torch.tensor(c.answer) for c in conversations)
    return most_frequent(answers, vocab, min(draft_vocab, vocab), eos_ids(config))


def make_basis(
    target: FrozenTarget, conversations: Sequence[Conversation], shape: HeadShape, vocabulary: DraftVocabulary
) -> Basis:
    """The scale is that of the states of ``conversations``."""
    some = conversations[:: max(1, len(conversations) // SCALE_CONVERSATIONS)]
    aux = torch.cat([target.hidden(torch.tensor(c.tokens), shape.aux_layers)[0] for c in some])
    embedding = target.embedding.cpu().contiguous()
    tied = target.head.data_ptr() == target.embedding.data_ptr()
    return Basis(
        shape=shape,
        vocabulary=vocabulary,
        scale=channel_scale(aux).cpu(),
        embedding=embedding,
        output=embedding if tied else target.head.cpu().contiguous(),
        target_norm=None if target.norm is None else target.norm.cpu(),
    )


def save_basis(folder: Path, basis: Basis) -> None:
    """Write it to ``folder``."""
    tensors = {
        "ids": basis.vocabulary.ids,
        "scale": basis.scale,
        "embedding": basis.embedding,
    }
    if basis.output is not basis.embedding:
        tensors["output"] = basis.output
    if basis.target_norm is not None:
        tensors["target_norm"] = basis.target_norm
    write_atomically(folder / "basis.safetensors", lambda temporary: save_file(tensors, temporary))
    write_text_atomically(folder / "basis.json", json.dumps(basis.shape.as_facts(), indent=1) + "\n")


def has_basis(folder: Path) -> bool:
    """Whether :func:`save_basis` has written one."""
    return (folder / "basis.json").is_file()


def load_basis(folder: Path) -> Basis:
    """What :func:`save_basis` wrote.

    Raises:
        ConfigError: it has not, or another version of this program wrote it.
    """
    if not has_basis(folder):
        raise ConfigError("basis: got none in the work folder, expected the states stage to come first")
    facts = json.loads((folder / "basis.json").read_text("utf-8"))
    shape = HeadShape(**{**facts, "aux_layers": tuple(facts["aux_layers"])})
    tensors = load_file(folder / "basis.safetensors")
    if "target_head" in tensors:  # states were kept the same, but not the target's whole output layer
        raise ConfigError(
            f"work: got {str(folder)!r} of an older version, expected another folder; its conversations.jsonl can be "
            "given as --conversations"
        )
    return Basis(
        shape=shape,
        vocabulary=DraftVocabulary(tensors["ids"], shape.vocab),
        scale=tensors["scale"],
        embedding=tensors["embedding"],
        output=tensors.get("output", tensors["embedding"]),
        target_norm=tensors.get("target_norm"),
    )
