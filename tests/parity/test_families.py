"""Every family against Transformers on a small random checkpoint, and bitwise against itself in other batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dynaspec.model.attention.reference import ReferenceAttention
from dynaspec.model.decoder import Decoder, Model, OpsDecoder
from dynaspec.model.kernels.decode import logits
from dynaspec.model.kernels.tiles import ROW_WORK
from dynaspec.model.loader import load_model
from dynaspec.model.ops import Ops

from .checkpoints import GPT_SIZES, LLAMA_SIZES, TEXTS, VOCAB, save_random, their_logits
from .paging import PagedTexts, all_states, in_passes

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers' own

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
    "original_max_position_embeddings": 4,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", LLAMA_SIZES),
    "llama_head_dim_24": ("LlamaConfig", LLAMA_SIZES | {"head_dim": 24, "num_key_value_heads": 1}),
    "llama_bias_tied": (
        "LlamaConfig",
        LLAMA_SIZES | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama3_rope": ("LlamaConfig", LLAMA_SIZES | {"rope_parameters": LLAMA3_ROPE}),
    "llama_linear_rope": (
        "LlamaConfig",
        LLAMA_SIZES | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "mistral": ("MistralConfig", LLAMA_SIZES | {"sliding_window": 9}),
    "qwen2": (
        "Qwen2Config",
        {key: value for key, value in LLAMA_SIZES.items() if key != "head_dim"}
        | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", LLAMA_SIZES | {"head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        LLAMA_SIZES | {"sliding_window": 9, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        LLAMA_SIZES
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 9,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            },
        },
    ),
    "phi3": ("Phi3Config", {k: v for k, v in LLAMA_SIZES.items() if k != "head_dim"} | {"sliding_window": 9}),
    "phi3_longrope": (
        "Phi3Config",
        {k: v for k, v in LLAMA_SIZES.items() if k != "head_dim"}
        | {
            "hidden_size": 64,
            "original_max_position_embeddings": 4,
            "max_position_embeddings": 96,
            "rope_parameters": LONG_ROPE,
        },
    ),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "word_embed_proj_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "ffn_dim": 72,
            "max_position_embeddings": 96,
            "init_std": 0.1,
        },
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {k: v for k, v in LLAMA_SIZES.items() if k not in ("head_dim", "num_key_value_heads")}
        | {"hidden_size": 64, "rotary_pct": 0.25, "hidden_act": "gelu"},
    ),
    "gpt_neox_sequential": (
        "GPTNeoXConfig",
        {k: v for k, v in LLAMA_SIZES.items() if k not in ("head_dim", "num_key_value_heads")}
        | {"use_parallel_residual": False, "rotary_pct": 1.0},
    ),
    "gpt2": ("GPT2Config", GPT_SIZES),
    "gptj": ("GPTJConfig", GPT_SIZES | {"rotary_dim": 8}),
    "codegen": ("CodeGenConfig", GPT_SIZES | {"n_embd": 64, "rotary_dim": 8}),
}

RAGGED = [(20, 0, 5), (17, 18, 0), (1, 0, 0), (2, 0, 0), *[(1, 0, 0)] * 3]


@pytest.fixture(scope="module", params=CASES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    theirs = save_random(*CASES[request.param], directory)
    return load_model(str(directory)), theirs


def test_logits_are_those_of_transformers(models: tuple[Model, Any]) -> None:
    ours, theirs = models
    for found, expected in zip(in_passes(ours, TEXTS, RAGGED), their_logits(theirs), strict=True):
        assert expected.abs().max() > 0.5, "logits too flat to tell anything"
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_single_operations_compute_the_same(models: tuple[Model, Any]) -> None:
    ours, theirs = models
    assert isinstance(ours, Decoder)
    single = in_single_operations(ours)
    for found, expected in zip(in_passes(single, TEXTS, RAGGED), their_logits(theirs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    paged = [PagedTexts(model, 1, len(TEXTS[0])) for model in (ours, single)]
    taps = [all_states(texts) for texts in paged]
    torch.testing.assert_close(taps[1], taps[0], rtol=1e-4, atol=1e-4)


def in_single_operations(model: Decoder) -> Decoder:
    """The same weights run by what runs on other devices and in other dtypes."""
    config, weights, device = model.config, model.weights, model.device
    attention = ReferenceAttention(model.attention.spec, device)
    return OpsDecoder(config, weights, attention, Ops(), device, model.dtype, model.product_dtype)


def test_compiled_logits_have_the_same_bits(models: tuple[Model, Any]) -> None:
    ours, _ = models
    assert isinstance(ours, Decoder)
    assert ours.compiled is not None
    hidden = torch.randn(5, ours.config.hidden_size)
    assert torch.equal(torch.from_numpy(logits(ours.compiled, hidden.numpy())), ours.logits(hidden))


def test_rows_are_bitwise_independent_of_batch_and_chunks(models: tuple[Model, Any]) -> None:
    ours, _ = models
    together = in_passes(ours, TEXTS, RAGGED)
    for text, expected in zip(TEXTS, together, strict=True):
        for chunk in (1, 7, len(text)):
            passes = [(chunk,)] * -(-len(text) // chunk)
            (alone,) = in_passes(ours, [text], passes, seed=chunk)
            assert torch.equal(alone, expected), f"chunks of {chunk}"


def test_taps_are_the_hidden_states_and_change_no_bits(models: tuple[Model, Any]) -> None:
    ours, theirs = models
    paged, plain = PagedTexts(ours, 1, len(TEXTS[0])), PagedTexts(ours, 1, len(TEXTS[0]))
    states = all_states(paged)
    with torch.no_grad():
        expected = theirs(torch.tensor([TEXTS[0]]), output_hidden_states=True).hidden_states
    for state in range(ours.config.num_layers):
        torch.testing.assert_close(states[state], expected[state][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[-1], expected[-1][0], rtol=1e-4, atol=1e-4)  # after the final norm
    assert torch.equal(states[-1], plain.model.forward(plain.batch({0: TEXTS[0]}), plain.kv))
    for with_taps, without in zip(paged.kv, plain.kv, strict=True):
        for one, other in zip(with_taps, without, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_three_hundred_rows_of_mixed_texts_have_the_bits_of_single_ones(tmp_path: Path) -> None:
    save_random(*CASES["llama"], tmp_path)
    model = load_model(str(tmp_path))
    lengths = [90, 88, 85, *[3] * 20]
    texts = [random.Random(i).choices(range(VOCAB), k=length) for i, length in enumerate(lengths)]
    together = in_passes(model, texts, [(0, 0, 0, *[2] * 20), (90, 88, 85, *[1] * 20)])
    for text, expected in zip(texts, together, strict=True):
        (alone,) = in_passes(model, [text], [(5,)] * 20)
        assert torch.equal(alone, expected)


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3", "gpt2"])
def test_rows_shared_out_over_threads_have_the_same_bits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random(*CASES[case], tmp_path)
    texts = [random.Random(i).choices(range(VOCAB), k=90) for i in range(7)]
    assert 7 * 90 * LLAMA_SIZES["intermediate_size"] >= ROW_WORK  # else nothing is shared out; shares end within texts
    expected = in_passes(load_model(str(tmp_path)), texts, [(90,) * 7])
    monkeypatch.setattr("dynaspec.model.cpu_decoder.team_size", lambda threads: 3)
    for found, alone in zip(in_passes(load_model(str(tmp_path)), texts, [(90,) * 7]), expected, strict=True):
        assert torch.equal(found, alone)
