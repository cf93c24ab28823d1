"""GGUF files against Transformers, whose model has the dequantised weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.decoder import Decoder, Model
from dynaspec.model.gguf.file import KINDS
from dynaspec.model.gguf.transformers import transformers_config, transformers_model
from dynaspec.model.kernels import gemm
from dynaspec.model.loader import load_model
from parity.paging import in_passes

from . import files

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers' own

TEXT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71, 69, 39, 93]
THETA = {"rope_theta": 10000.0}
LLAMA3 = THETA | {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = THETA | {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
    "original_max_position_embeddings": 4,
}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": THETA | {"rope_type": "linear", "factor": 2.0},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied_bias": ("LlamaConfig", {"tie_word_embeddings": True, "mlp_bias": True}),
    "llama3_rope": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama_linear": ("LlamaConfig", {"rope_parameters": THETA | {"rope_type": "linear", "factor": 2.0}}),
    "qwen2": ("Qwen2Config", {"head_dim": 16}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"sliding_window": 9, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "phi3": ("Phi3Config", {"head_dim": 16, "sliding_window": 9, "rope_parameters": THETA | {"rope_type": "default"}}),
    "phi3_partial": (
        "Phi3Config",
        {"head_dim": 16, "rope_parameters": THETA | {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "phi3_longrope": (
        "Phi3Config",
        {"head_dim": 16, "original_max_position_embeddings": 4, "rope_parameters": LONG},
    ),
}


def logits(model: Model) -> torch.Tensor:
    return in_passes(model, [TEXT], [(5,), (len(TEXT) - 5,)])[0]


def check(ours: Model, theirs: Any) -> None:
    with torch.no_grad():
        expected = theirs(torch.tensor([TEXT])).logits[0]
    assert expected.abs().max() > 0.5, "logits too flat to tell anything"
    torch.testing.assert_close(logits(ours), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    name, options = CASES[case]
    theirs = files.random_model(name, **options)
    ours = load_model(str(files.write(tmp_path / "model.gguf", theirs)))
    assert isinstance(ours, Decoder)
    check(ours, theirs)


ALONE = """
import sys
from pathlib import Path
from dynaspec.model.decoder_heads.config import llama_decoder
from dynaspec.model.loader import load_model
load_model(sys.argv[1])
sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100}
llama_decoder(Path("config.json"), sizes, qkv_bias=False)
print("transformers" in sys.modules)
"""


def test_a_file_and_a_head_are_read_without_transformers(tmp_path: Path) -> None:
    """What its configs import takes longer than reading most files."""
    path = files.write(tmp_path / "model.gguf", files.random_model("LlamaConfig"))
    command = [sys.executable, "-c", ALONE, str(path)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize("case", CASES)
def test_becomes_a_model_of_transformers_again(case: str, tmp_path: Path) -> None:
    name, options = CASES[case]
    theirs = files.random_model(name, **options)
    path = files.write(tmp_path / "model.gguf", theirs, dtype=torch.float32)
    again = transformers_model(path, torch.float32).eval()
    with torch.no_grad():
        expected, got = theirs(torch.tensor([TEXT])).logits, again(torch.tensor([TEXT])).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_quantisation(kind: Kind, tmp_path: Path) -> None:
    theirs = files.random_model("LlamaConfig", hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1)
    check(load_model(str(files.write(tmp_path / "model.gguf", theirs, kind))), theirs)


def test_float32_keeps_every_dequantised_number(tmp_path: Path) -> None:
    theirs = files.random_model("LlamaConfig")
    path = str(files.write(tmp_path / "model.gguf", theirs, dtype=torch.float32))
    check(load_model(path, dtype="float32"), theirs)
    with pytest.raises(AssertionError, match="not close"):
        check(load_model(path), theirs)


def test_a_mixture_of_quantisations_is_packed_where_none_of_them_is_wider_than_bfloat16(tmp_path: Path) -> None:
    for kind, form in ((Kind.Q8_0, gemm.BFLOAT), (Kind.BF16, gemm.BFLOAT), (Kind.F16, gemm.FLOAT)):
        theirs = files.random_model("LlamaConfig")
        model = load_model(str(files.write(tmp_path / "model.gguf", theirs, kind)))
        assert isinstance(model, Decoder)
        qkv: Any = model.weights.layers[0].qkv
        assert qkv.form == form


def test_describes_itself(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(5)
        writer.add_token_list([b"<|im_end|>" if i == 7 else b"<|end|>" if i == 8 else b"%d" % i for i in range(311)])
        writer.add_token_types([3 if i == 7 else 1 for i in range(311)])

    path = files.write(tmp_path / "model.gguf", files.random_model("LlamaConfig"), edit=edit)
    config = load_model(str(path)).config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (2, 64, 311)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position) == (4, 2, 32, 96)
    assert config.eos_token_ids == (2, 5, 7)  # 8 is text that looks like the end of a turn
    theirs = transformers_config(path)
    assert (theirs.model_type, theirs.bos_token_id) == ("llama", 1)
    assert load_model(str(path), max_model_len=20).config.max_position == 20


def test_layers_have_windows_as_the_period_says(tmp_path: Path) -> None:
    theirs = files.random_model(
        "Gemma2Config", sliding_window=9, query_pre_attn_scalar=32, num_hidden_layers=3, attn_logit_softcapping=50.0
    )
    assert load_model(str(files.write(tmp_path / "a.gguf", theirs))).config.windows == (9, None, 9)
    edited = files.write(tmp_path / "b.gguf", theirs, edit=lambda writer: writer.add_sliding_window_pattern(3))
    assert load_model(str(edited)).config.windows == (9, 9, None)


def damaged(path: Path, old: bytes, new: bytes) -> Path:
    assert len(old) == len(new)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            b"blk.1.attn_q.weight",
            b"blk.1.attn_x.weight",
            r"model\.gguf lacks the tensor blk\.1\.attn_q\.weight, of shape",
        ),
        (b"token_embd", b"token_embx", r"lacks the tensor token_embd\.weight, of shape \[vocabulary, 64\]"),
        (b"llama.block_count", b"llama.block_coun_", r"has no llama\.block_count; expected a whole number"),
        (b"llama", b"mamba", r"has the architecture 'mamba'; expected one of llama, qwen2"),
    ],
)
def test_files_that_lack_something(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    path = files.write(tmp_path / "model.gguf", files.random_model("LlamaConfig"))
    with pytest.raises(CheckpointError, match=message):
        load_model(str(damaged(path, old, new)))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.expert_count", 8, "has 8 experts a layer; expected a dense model"),
        ("llama.attention.value_length", 16, "has values of 16 dimensions and keys of 32"),
        ("llama.rope.dimension_count", 16, "rotates 16 of 32 dimensions of a head"),
        (
            "llama.feed_forward_length",
            64,
            r"ffn_gate\.weight has shape \[96, 64\] in .*model\.gguf; its keys need \[64, 64\]",
        ),
        ("llama.attention.head_count", 0, r"has 0 for llama\.attention\.head_count; expected at least 1"),
        ("llama.attention.head_count_kv", 3, "has 4 heads of 32 dimensions and 3 KV heads"),
        ("llama.block_count", 2**31, "has 2147483648 layers by its keys and 21 tensors"),
        ("llama.block_count", 1, r"holds 9 tensors that llama has no place for, such as blk\.1\."),
        ("llama.context_length", "long", r"has 'long' for llama\.context_length; expected a whole number"),
        ("llama.rope.scaling.type", "yarn", 'rotary scaling "yarn"'),
        ("split.count", 2, "is one of 2 parts"),
    ],
)
def test_keys_that_do_not_fit(key: str, value: Any, message: str, tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        kind = gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
        for pairs in writer.kv_data:
            pairs.pop(key, None)
        writer.add_key_value(key, value, kind)

    path = files.write(tmp_path / "model.gguf", files.random_model("LlamaConfig"), edit=edit)
    with pytest.raises(CheckpointError, match=message):
        load_model(str(path))


def test_a_tensor_that_nothing_needs(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", torch.zeros(4).numpy())

    path = files.write(tmp_path / "model.gguf", files.random_model("LlamaConfig"), edit=edit)
    with pytest.raises(
        CheckpointError, match=r"holds 1 tensors that llama has no place for, such as blk\.0\.attn_sinks"
    ):
        load_model(str(path))


def test_a_quantisation_that_is_not_read(tmp_path: Path) -> None:
    path = files.write(tmp_path / "model.gguf", files.random_model("LlamaConfig"))
    data = path.read_bytes()
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    for number, message in (
        (39, "in MXFP4, a quantisation that is not read; expected one of F32"),
        (99, "in quantisation 99"),
    ):
        path.write_bytes(data[:at] + number.to_bytes(4, "little") + data[at + 4 :])
        with pytest.raises(CheckpointError, match=r"model\.gguf has the tensor blk\.0\.ffn_up\.weight .*" + message):
            load_model(str(path))


def test_paths_that_are_no_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no file .*gone\.gguf"):
        load_model(str(tmp_path / "gone.gguf"))
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model\.bin is a file; expected a directory .* or a \*\.gguf file"):
        load_model(str(tmp_path / "model.bin"))
