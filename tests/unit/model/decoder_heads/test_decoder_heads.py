"""Heads: what they compute, in every published layout, and what is said of those that cannot be right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dynaspec.contract.errors import CheckpointError
from dynaspec.contract.proposer import Drafts
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.checkpoint import checkpoint_method
from dynaspec.kv.blocks import Arena
from dynaspec.model.attention.reference import ReferenceAttention
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.model.decoder import Model, OpsStack
from dynaspec.model.decoder_heads import load_head
from dynaspec.model.decoder_heads.eagle3 import load_eagle3, read_config
from dynaspec.model.loader import load_model
from dynaspec.model.ops import Ops
from dynaspec.model.taps import Taps
from dynaspec.propose.autoregressive import AutoregressiveProposer
from dynaspec.propose.drafter import DecoderHeadDrafter
from dynaspec.sampling.state import SamplerState
from support.decoder_heads import LAYOUTS, Layout, config_of, random_tensors, reference, write
from support.head_passes import logits_of, rows, states_of
from unit.model import tiny
from unit.propose.batches import batch, block_tables, plan, target

TEXT = np.random.default_rng(0).integers(3, 50, 37).tolist()
CHAIN = [7, 30, 7, 11]
BY_NAME = {layout.name: layout for layout in LAYOUTS}
SPECULATORS = BY_NAME["speculators"]
DRAFTING = [BY_NAME[name] for name in ("speculators", "eagle, biases by default", "mimo", "speculators, mtp")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(str(tiny.write(tmp_path_factory.mktemp("tiny"))))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_head_computes_what_its_layout_says(layout: Layout, model: Model, tmp_path: Path) -> None:
    path = write(layout, tmp_path)
    head, s = load_head(layout.method, str(path), model), layout.shape
    assert head.settings.states == s.states
    states, tensors = states_of(model, TEXT, s.states), random_tensors(layout)
    embedding, output = tiny.tensors()["model.embed_tokens.weight"], tiny.tensors()["lm_head.weight"]
    expected = reference(layout, tensors, embedding, output, TEXT, states[:-1], CHAIN)
    whole = logits_of(head, states, TEXT, CHAIN, len(TEXT))
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits_of(head, states, TEXT, CHAIN, 5), whole)
    ids = tensors["d2t"] + torch.arange(s.draft_vocab) if "d2t" in tensors else None
    assert (head.vocabulary is None) == (ids is None)
    if ids is not None:
        assert head.vocabulary is not None
        assert head.vocabulary.tolist() == ids.tolist()
    assert checkpoint_method(path) == (layout.method if layout.says_so else "draft_model")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_single_operations_compute_the_same(layout: Layout, model: Model, tmp_path: Path) -> None:
    head = load_head(layout.method, str(write(layout, tmp_path)), model)
    states = states_of(model, TEXT, layout.shape.states)
    whole = logits_of(head, states, TEXT, CHAIN, len(TEXT))
    head.compiled = None
    head._attention = ReferenceAttention(head._attention.spec, torch.device("cpu"))
    head._stack = OpsStack(head.config, head._weights.layers, head._attention, Ops(), torch.device("cpu"))
    single = logits_of(head, states, TEXT, CHAIN, 7)
    torch.testing.assert_close(single, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "single operations"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_rows_for_their_kv_only(layout: Layout, compiled: bool, model: Model, tmp_path: Path) -> None:
    head = load_head(layout.method, str(write(layout, tmp_path)), model)
    if not compiled:
        head.compiled = None
    states = states_of(model, TEXT, layout.shape.states)[:-1]
    batch, found = rows(TEXT[1:], 1, 3), []
    for kv_only in (None, np.array([33], np.int32)):
        kv = Arena.allocate(head.config.num_layers, head.kv_shapes(3), torch.float32, torch.device("cpu")).layers
        found.append((head.forward(replace(batch, kv_only=kv_only), head.fuse(states.clone()), kv), kv))
    (whole, all_kv), (read, same_kv) = found
    assert torch.equal(read, whole[33:])
    assert all(torch.equal(*caches) for pair in zip(all_kv, same_kv, strict=True) for caches in zip(*pair, strict=True))


class Desk:
    """A proposer over growing texts, with the states of their target."""

    def __init__(self, model: Model, layout: Layout, path: Path, *, compiled: bool = True, most: int = 512) -> None:
        self.model = model
        head = load_head(layout.method, str(path), model)
        self.texts = [np.random.default_rng(i).integers(3, 50, size).tolist() for i, size in enumerate((20, 5, 33, 16))]
        self.tables, sampler = block_tables(size=BLOCK_SIZE), SamplerState(4, 50)
        self.arena = Arena.allocate(head.config.num_layers, head.kv_shapes(40), torch.float32, torch.device("cpu"))
        self.kv = Arena.allocate(2, model.kv_shapes(40), torch.float32, torch.device("cpu")).layers
        self.taps = Taps.allocate(head.settings.states, 40, 2, 32, torch.float32, torch.device("cpu"))
        drafter = DecoderHeadDrafter(head, self.arena, self.taps, layout.method)
        if not compiled:
            drafter.chain = None
        self.proposer = AutoregressiveProposer(drafter, self.tables, sampler, max_length=64, catch_up_tokens=most)
        for lane, text in enumerate(self.texts):
            sampler.add(
                lane, SamplingParams(temperature=0), seed=0, n_index=0, eos_token_ids=(), bad_words=(), prompt=()
            )
            assert self.tables.try_open(lane, [], len(text))
            self.proposer.admit(lane, (), "")
            self.run(lane, text[:-1], 0)

    def run(self, lane: int, tokens: list[int], start: int) -> None:
        """The target's pass over tokens of a text."""
        at = np.arange(start, start + len(tokens), dtype=np.int64)
        table = self.tables.array[lane]
        self.model.forward(
            ForwardBatch(
                tokens=torch.tensor(tokens),
                positions=at,
                slots=table[at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE,
                query_start=np.array([0, len(tokens)], np.int32),
                context_lens=np.array([start], np.int32),
                block_tables=table[None].copy(),
            ),
            self.kv,
            self.taps,
        )

    def step(self, depth: tuple[int, ...], accepted: tuple[int, ...]) -> Drafts:
        for lane, k in enumerate(depth):
            assert self.tables.try_grow(lane, len(self.texts[lane]) + k)
        drafts = self.proposer.propose(batch(*self.texts, tables=self.tables), plan(*depth))
        right = np.minimum(drafts.lens, accepted)
        for lane, text in enumerate(self.texts):
            self.run(lane, [text[-1], *drafts.tokens[lane, : drafts.lens[lane]].tolist()], len(text) - 1)
        self.proposer.advance(target(range(4), [len(text) for text in self.texts], right.tolist()))
        for lane, n in enumerate(right.tolist()):
            self.texts[lane] += [*drafts.tokens[lane, :n].tolist(), 7]
        return drafts


STEPS = [
    ((4, 2, 6, 1), (4, 0, 3, 1)),
    ((0, 5, 1, 3), (0, 2, 1, 0)),
    ((0, 0, 0, 0), (0, 0, 0, 0)),
    ((3, 3, 3, 3), (1, 3, 0, 2)),
    ((6, 0, 0, 0), (6, 0, 0, 0)),
    ((2, 2, 2, 2), (1, 1, 1, 1)),
]


@pytest.mark.parametrize("layout", DRAFTING, ids=lambda layout: layout.name)
def test_drafts_are_those_of_the_plain_reference(layout: Layout, model: Model, tmp_path: Path) -> None:
    """After rejections, full acceptance, and steps that drafted nothing."""
    path, tensors = write(layout, tmp_path), random_tensors(layout)
    desk = Desk(model, layout, path)
    embedding, output = tiny.tensors()["model.embed_tokens.weight"], tiny.tensors()["lm_head.weight"]
    ids = torch.arange(layout.shape.draft_vocab) + tensors.get("d2t", 0)
    for depth, accepted in STEPS:
        before = [list(text) for text in desk.texts]
        drafts = desk.step(depth, accepted)
        for lane, text in enumerate(before):
            states, chain = (
                states_of(model, text, layout.shape.states)[:-1],
                drafts.tokens[lane, : depth[lane]].tolist(),
            )
            logits = reference(layout, tensors, embedding, output, text, states, chain)
            best = ids[logits[len(text) - 2 :].argmax(1)]
            assert chain == best[: depth[lane]].tolist()


@pytest.mark.parametrize("layout", DRAFTING, ids=lambda layout: layout.name)
@pytest.mark.parametrize("most", [512, 4])
def test_compiled_drafts_are_those_of_single_passes(most: int, layout: Layout, model: Model, tmp_path: Path) -> None:
    path = write(layout, tmp_path)
    compiled, single = (Desk(model, layout, path, compiled=whole, most=most) for whole in (True, False))
    for depth, accepted in STEPS:
        whole, parts = compiled.step(depth, accepted), single.step(depth, accepted)
        assert whole.tokens.tolist() == parts.tokens.tolist()
        assert whole.lens.tolist() == parts.lens.tolist()
        assert whole.rows_per_pass == parts.rows_per_pass
        assert np.array_equal(whole.confidence, parts.confidence)  # type: ignore[arg-type]
    for mine, other in zip(compiled.arena.layers[0], single.arena.layers[0], strict=True):
        assert torch.equal(mine, other)


def broken(
    tmp_path: Path, layout: Layout, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None
) -> Path:
    """A head with other keys or tensors; None = left out."""
    path = write(layout, tmp_path)
    changed = random_tensors(layout) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: t for name, t in changed.items() if t is not None}, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text()) | (config or {})
    (path / "config.json").write_text(json.dumps(raw))
    return path


def test_a_head_that_cannot_be_right_is_refused_in_a_sentence(model: Model, tmp_path: Path) -> None:
    other = BY_NAME["two layers"]
    cases: list[tuple[Path, str]] = [
        (broken(tmp_path / "a", SPECULATORS, {"target_hidden_size": 64}), "hidden states of width 64.*have 32"),
        (broken(tmp_path / "b", other, {"vocab_size": 60}), "vocabulary has 60 tokens.*has 50"),
        (broken(tmp_path / "c", other, {"eagle_aux_hidden_state_layer_ids": [0, 1, 30]}), r"\[0, 1, 30\].*2 layers"),
        (broken(tmp_path / "d", SPECULATORS, fc__weight=None), r"lacks the tensor fc.weight, of shape \[32, 96\]"),
        (broken(tmp_path / "e", SPECULATORS, norm__weight=torch.ones(7)), r"norm.weight has shape \[7\].*\[32\]"),
        (broken(tmp_path / "f", SPECULATORS, surplus__weight=torch.ones(7)), "no place for, such as surplus.weight"),
        (broken(tmp_path / "g", SPECULATORS, d2t=torch.full((20,), 49)), "d2t leads to ids from 49 to 68"),
        (broken(tmp_path / "h", SPECULATORS, d2t=None), r"lacks the tensor d2t, of shape \[20\]"),
        (broken(tmp_path / "i", other, {"hidden_size": None}), "hidden_size is None; expected a whole number"),
        (broken(tmp_path / "k", other, {"head_dim": 12.5}), "head_dim is 12.5; expected a whole number"),
        (broken(tmp_path / "l", other, {"num_key_value_heads": 0}), "num_key_value_heads is 0; expected a whole num"),
        (broken(tmp_path / "m", other, {"rms_norm_eps": "tiny"}), "rms_norm_eps is 'tiny'; expected a number"),
        (broken(tmp_path / "n", other, {"rope_scaling": {"type": "linear"}}), "the head's decoder cannot be built"),
        (broken(tmp_path / "j", other, {"eagle_config": {"use_mtp_layernorm": True}}), "use_mtp_layernorm is True"),
    ]
    for path, sentence in cases:
        with pytest.raises(CheckpointError, match=sentence):
            load_eagle3(str(path), model)


def test_eagle_heads_that_cannot_be_right(model: Model, tmp_path: Path) -> None:
    plain, biased = BY_NAME["eagle, vllm"], BY_NAME["eagle, biases by default"]
    wide = random_tensors(replace(plain, shape=replace(plain.shape, hidden=64)))
    cases: list[tuple[Path, str]] = [
        (broken(tmp_path / "a", plain, {"hidden_size": 64}, **wide), "hidden states of width 64.*have 32"),
        (broken(tmp_path / "b", plain, {"vocab_size": 60}), "vocabulary has 60 tokens.*has 50"),
        (broken(tmp_path / "c", plain, fc__weight=None), r"lacks the tensor fc.weight, of shape \[32, 64\]"),
        (broken(tmp_path / "d", biased, fc__bias=None), r"lacks the tensor fc.bias, of shape \[32\]"),
        (broken(tmp_path / "e", biased, {"bias": False}), "no place for, such as fc.bias"),
        (broken(tmp_path / "f", plain, fc__weight=torch.ones(32, 32)), r"fc.weight has shape \[32, 32\].*\[32, 64\]"),
        (
            broken(tmp_path / "g", plain, layers__0__input_layernorm__weight=torch.ones(32)),
            "such as layers.0.input_lay",
        ),
        (broken(tmp_path / "h", plain, {"num_hidden_layers": 2}), "lacks the tensor layers.1.input_layernorm.weight"),
        (broken(tmp_path / "i", plain, {"transformer_layer_config": {}}), "EAGLE heads of `speculators` are not read"),
        (broken(tmp_path / "j", plain, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}), "cannot be built"),
    ]
    for path, sentence in cases:
        with pytest.raises(CheckpointError, match=sentence) as raised:
            load_head("eagle", str(path), model)
        assert str(path) in str(raised.value)


def test_prediction_layers_that_cannot_be_right(model: Model, tmp_path: Path) -> None:
    mimo, nested = BY_NAME["mimo"], BY_NAME["speculators, mtp"]
    moe = config_of(nested)["transformer_layer_config"] | {"model_type": "qwen3_next"}
    cases: list[tuple[Path, str]] = [
        (broken(tmp_path / "a", mimo, {"hidden_size": 64}), "hidden states of width 64.*have 32"),
        (broken(tmp_path / "b", mimo, {"vocab_size": 60}), "vocabulary has 60 tokens.*has 50"),
        (broken(tmp_path / "c", mimo), "lacks the tensor mtp_layers.0.input_layernorm.weight"),  # all are misnamed
        (
            broken(tmp_path / "d", nested, mtp_layers__0__input_proj__weight=None),
            r"input_proj.weight, of shape \[32, 64\]",
        ),
        (
            broken(tmp_path / "e", nested, mtp_layers__0__mlp__gate__weight=torch.ones(7)),
            "such as mtp_layers.0.mlp.gate",
        ),
        (broken(tmp_path / "f", mimo, {"num_nextn_predict_layers": 2}), "num_nextn_predict_layers is 2; expected 1"),
        (
            broken(tmp_path / "g", nested, {"transformer_layer_config": moe}),
            "model_type is 'qwen3_next'; expected a MiMo",
        ),
        (
            broken(tmp_path / "h", mimo, {"architectures": ["DeepseekV3ForCausalLM"]}),
            "is a DeepseekV3ForCausalLM; expected",
        ),
        (broken(tmp_path / "i", mimo, {"architectures": ["Glm4MoeForCausalLM"]}), "is a Glm4MoeForCausalLM; expected"),
        (broken(tmp_path / "j", mimo, {"rope_scaling": {"type": "yarn", "factor": 2.0}}), "cannot be built"),
    ]
    for path, sentence in cases:
        with pytest.raises(CheckpointError, match=sentence) as raised:
            load_head("mtp", str(path), model)
        assert str(path) in str(raised.value)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(
        CheckpointError, match="is a GGUF file, of which no prediction layers are read; expected a MiMo"
    ):
        load_head("mtp", str(tmp_path / "model.gguf"), model)


def test_a_head_s_pickled_file_is_fetched_from_the_hub(model: Model, tmp_path: Path) -> None:
    layout = BY_NAME["eagle"]
    wanted: list[str] = []

    def snapshot(repo: str, revision: str | None, allow_patterns: list[str]) -> str:
        wanted.extend(allow_patterns)
        return str(write(layout, tmp_path))

    with mock.patch("huggingface_hub.snapshot_download", snapshot):
        load_head("eagle", "someone/a-head", model)
    assert "pytorch_model.bin" in wanted


def test_states_by_default_and_by_either_kind_of_layer_numbers() -> None:
    raw = {
        "hidden_size": 8,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
        "num_key_value_heads": 1,
    }
    assert read_config(Path("config.json"), raw, 32).states == (2, 16, 29)
    inputs = raw | {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}
    assert read_config(Path("config.json"), inputs, 36).states == (2, 18, 33)
    outputs = raw | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}
    assert read_config(Path("config.json"), outputs, 32).states == (2, 16, 29)


def test_a_pickled_file_that_is_none_is_refused(model: Model, tmp_path: Path) -> None:
    path = write(replace(BY_NAME["original"]), tmp_path)
    (path / "pytorch_model.bin").write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not a readable PyTorch checkpoint"):
        load_eagle3(str(path), model)
