"""The tokenizer that a GGUF file describes, as one of Transformers'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.gguf.file import GgufFile

_KEY = "tokenizer.ggml"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Values of ``token_type``."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{digits}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_LLAMA3 = f"{_CONTRACTIONS}|{_WORDS.replace('{digits}', '{1,3}')}"
_QWEN2 = f"{_CONTRACTIONS}|{_WORDS.replace('{digits}', '')}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{end}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{end}}"
_SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
_GPT4O = _CASED.replace("{end}", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}|" + _SIGNS
_TEKKEN = _CASED.replace("{end}", "") + r"|\p{N}|" + _SIGNS
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_OLD_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (_QWEN2,)),
    "gpt-4o": (_GPT4O,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", _GPT2)),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+", r"\p{N}"),
    "default": _OLD_DEFAULT,
}
"""By the name of the way in which a text is cut before tokens are looked up: the patterns that cut it, one after the
other. They belong to the vocabularies."""
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
"""Where what is in the vocabulary as a whole is one token, whatever the merges say; they begin with a BOS token."""
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})
"""Where texts are put into Unicode's composed form first."""


def gguf_tokenizer(path: Path, **options: Any) -> Any:
    """A fast tokenizer of Transformers, with the file's special tokens and chat templates.

    Args:
        options: of ``PreTrainedTokenizerFast``.

    Raises:
        CheckpointError: the file has no tokenizer, or one that is not known.
    """
    from transformers import PreTrainedTokenizerFast  # takes seconds to import

    vocabulary = _Vocabulary(GgufFile(path))
    try:
        backend = vocabulary.backend()
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers' own, which has no class
        raise CheckpointError(f"{path} has a tokenizer that does not fit together: {error}") from error
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=vocabulary.templates(),
        clean_up_tokenization_spaces=False,
        **vocabulary.named(),
        **options,
    )


class _Vocabulary:
    """The keys about tokens of one file."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._kind = file.get(f"{_KEY}.model", str)
        self._tokens = file.items(f"{_KEY}.tokens", str) or []
        if self._kind is None or not self._tokens:
            raise CheckpointError(
                f"{file.path} has no tokenizer ({_KEY}.model and {_KEY}.tokens); expected one, or a folder with the "
                "model's as `tokenizer`"
            )
        self._types = self._beside("token_type", int) or [_NORMAL] * len(self._tokens)
        self._pre = file.get(f"{_KEY}.pre", str) or "default"

    def backend(self) -> Any:
        """What encodes and decodes."""
        if self._kind == "gpt2":
            backend = self._byte_level()
        elif self._kind == "llama":
            backend = self._sentencepiece()
        else:
            raise CheckpointError(
                f"{self._file.path} has a tokenizer of the kind {self._kind!r}; expected gpt2 or llama, or a folder "
                "with the model's as `tokenizer`"
            )
        self._add_whole_tokens(backend)
        self._add_ends(backend)
        return backend

    def named(self) -> dict[str, str]:
        """Special tokens by Transformers' names."""
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        found = {f"{ours}_token": self._special(theirs) for ours, theirs in names.items()}
        return {name: token for name, token in found.items() if token is not None}

    def templates(self) -> str | dict[str, str] | None:
        """The chat template, or several by their names."""
        default = self._file.get("tokenizer.chat_template", str)
        names = self._file.items("tokenizer.chat_templates", str) or []
        others = {name: self._file.get(f"tokenizer.chat_template.{name}", str) for name in names}
        named = {name: template for name, template in others.items() if template is not None}
        if not named or default is None:
            return default
        return {"default": default, **named}

    def _byte_level(self) -> Any:
        """BPE over bytes, each spelled as a symbol."""
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

        if self._pre not in _SPLITS:
            raise CheckpointError(
                f"{self._file.path} has a tokenizer that cuts texts as {self._pre!r}; expected one of "
                f"{', '.join(_SPLITS)}, or a folder with the model's as `tokenizer`"
            )
        merges = [_halves(merge) for merge in self._file.items(f"{_KEY}.merges", str) or []]
        whole = self._pre in _WHOLE_WORDS
        backend = Tokenizer(models.BPE(vocab=self._ids(), merges=merges, ignore_merges=whole))
        if self._pre in _COMPOSED:
            backend.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[self._pre]]
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
        return backend

    def _sentencepiece(self) -> Any:
        """BPE over characters, of which those that are no tokens are spelled in bytes."""
        from tokenizers import Tokenizer, decoders, models, normalizers, processors

        unknown = self._special("unknown")
        backend = Tokenizer(
            models.BPE(
                vocab=self._ids(),
                merges=self._merges(),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        prefix = self._file.get(f"{_KEY}.add_space_prefix", bool) is not False
        spaces = [normalizers.Replace(" ", _SPACE)]
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *spaces] if prefix else spaces)
        decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if prefix else decoding)
        backend.post_processor = processors.Sequence([])
        return backend

    def _ids(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self._tokens)}

    def _merges(self) -> list[tuple[str, str]]:
        """Every way to put a token together from two others, the tokens with the highest scores first."""
        scores = self._beside("scores", float) or [0.0] * len(self._tokens)
        order = {token: number for number, token in enumerate(self._tokens) if self._types[number] == _NORMAL}
        found = [
            (-scores[number], number, order[first], order[second], first, second)
            for token, number in order.items()
            for first, second in _cuts(token)
            if first in order and second in order
        ]
        return [(first, second) for *_, first, second in sorted(found)]

    def _add_whole_tokens(self, backend: Any) -> None:
        """Tokens that are found in a text before anything else."""
        from tokenizers import AddedToken

        # Phi-3's take the spaces along that follow them, but for those that it has from Llama 2
        strips = self._file.architecture == "phi3" and self._kind == "llama"
        kept = {"<unk>", "<s>", "<|endoftext|>"}
        kinds = list(zip(self._tokens, self._types, strict=True))
        special = [
            AddedToken(token, normalized=False, special=True, rstrip=strips and token not in kept)
            for token, kind in kinds
            if kind in (_CONTROL, _UNKNOWN) and token
        ]
        backend.add_special_tokens(special)
        plain = [token for token, kind in kinds if kind == _USER_DEFINED and token]
        backend.add_tokens([AddedToken(token, normalized=False, special=False, rstrip=strips) for token in plain])

    def _add_ends(self, backend: Any) -> None:
        """What a text begins and ends with."""
        from tokenizers import processors

        begins = self._file.get(f"{_KEY}.add_bos_token", bool)
        if begins is None:
            begins = self._kind == "llama" or self._pre in _WHOLE_WORDS
        bos = self._special("bos") if begins else None
        eos = self._special("eos") if self._file.get(f"{_KEY}.add_eos_token", bool) else None
        if bos is None and eos is None:
            return
        ends = [token for token in (bos, eos) if token is not None]
        single = [*([] if bos is None else [bos]), "$A", *([] if eos is None else [eos])]
        template = processors.TemplateProcessing(
            single=single, pair=[*single, "$B:1"], special_tokens=[(token, self._tokens.index(token)) for token in ends]
        )
        backend.post_processor = processors.Sequence([backend.post_processor, template])

    def _special(self, name: str) -> str | None:
        """The token with a meaning, as it is spelled."""
        key = f"{_KEY}.{name}_token_id"
        number = self._file.get(key, int)
        if number is None:
            return None
        if not 0 <= number < len(self._tokens):
            raise CheckpointError(
                f"{self._file.path} has {number} for {key}; expected one of its {len(self._tokens)} tokens"
            )
        return self._tokens[number]

    def _beside(self, name: str, kind: type[Any]) -> Sequence[Any] | None:
        """A list with a value for each token; None if the file lacks it."""
        values = self._file.items(f"{_KEY}.{name}", kind)
        if values is not None and len(values) != len(self._tokens):
            raise CheckpointError(
                f"{self._file.path} has {len(values)} values for {_KEY}.{name}; expected one for each of its "
                f"{len(self._tokens)} tokens"
            )
        return values


def _cuts(token: str) -> Iterator[tuple[str, str]]:
    """Every way to cut a token into two parts."""
    return ((token[:at], token[at:]) for at in range(1, len(token)))


def _halves(merge: str) -> tuple[str, str]:
    """The two tokens of a merge, which a space parts; the first one may begin with one."""
    at = merge.find(" ", 1)
    return (merge[:at], merge[at + 1 :]) if at > 0 else (merge, "")
