"""Byte-level BPE: any text goes in and comes back unchanged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dynaspec.contract.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)

# Words with their leading space, digits one at a time (numbers of any length then have one
# reading), runs of punctuation, and white space that leaves its last space to the next word.
PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# System text stands above the dialogue; a turn looks like a training document of GSM8K.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{{- message['content'] + '\n\n' -}}"
    "{%- elif message['role'] == 'user' -%}{{- 'Question: ' + message['content'] + '\n' -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- 'Answer: ' + message['content'] + eos_token -}}"
    "{%- else -%}{{- raise_exception('role: got ' + message['role']"
    " + ', expected system, user or assistant') -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Answer:' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges until the vocabulary has ``vocab_size`` entries (bytes and end-of-text included).

    Raises:
        ConfigError: ``vocab_size`` has no room for the 256 bytes and the end-of-text token.
    """
    if vocab_size < 257:
        raise ConfigError(f"vocab_size: got {vocab_size}, expected at least 257 (256 bytes and end of text)")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` as ``AutoTokenizer`` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        # The name that Transformers 4 and 5 and vLLM all know.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a checkpoint's tokenizer as it is, chat template included."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read a checkpoint's tokenizer, or the one that the stage ``prepare`` has left.

    Raises:
        ConfigError: the folder has no ``tokenizer.json``.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"tokenizer: {str(path)!r} does not exist, expected what the stage 'prepare' writes")
    return Tokenizer.from_file(str(path))
