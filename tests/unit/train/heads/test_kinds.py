"""Every kind of head on the test target: it learns, goes on after a stop, and drafts as it was trained to.

All share one work folder, so conversations and states are made once.
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from dynaspec import LLM, SamplingParams
from dynaspec.cli.train import app
from dynaspec.model.decoder import Model
from dynaspec.model.decoder_heads import load_head
from dynaspec.model.loader import load_model
from dynaspec.model.state_heads.base import StateHeads
from dynaspec.model.state_heads.medusa import load_medusa
from dynaspec.model.state_heads.mlp_speculator import load_mlp_speculator
from dynaspec.train.heads.basis import load_basis
from dynaspec.train.heads.conversations import read_conversations
from dynaspec.train.heads.eagle import Eagle
from dynaspec.train.heads.head import Kind, join
from dynaspec.train.heads.state_heads import Medusa, MlpSpeculator
from dynaspec.train.heads.states import Cache
from support.commands import Result, run_command
from support.head_passes import logits_of, states_of

TARGET = Path(__file__).parents[3] / "models" / "target"
DEPTHS = 3
KINDS: dict[str, Kind] = {
    "eagle": Eagle(),
    "medusa": Medusa(DEPTHS, 2),
    "mlp_speculator": MlpSpeculator(DEPTHS, 32),
}
OWN = {"medusa": ("--layers", 2, "--draft-vocab", 512), "mlp_speculator": ("--inner-dim", 32), "eagle": ()}
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts, and a work folder up to the states."""
    folder = tmp_path_factory.mktemp("heads")
    lines = [json.dumps({"question": f"def f{i}(a):\n    return"}) for i in range(12)]
    (folder / "asked.jsonl").write_text("\n".join(lines) + "\n")
    for stage in ("data", "states"):
        done = train("medusa", folder / "work", folder / "none", "--stage", stage, "--prompts", folder / "asked.jsonl")
        assert done.code == 0, done.err
    return folder


@pytest.fixture
def work(collected: Path, tmp_path: Path) -> Path:
    return shutil.copytree(collected / "work", tmp_path / "work")


@pytest.fixture(scope="module")
def target() -> Model:
    return load_model(str(TARGET))


def train(kind: str, work: Path, out: Path, *arguments: object) -> Result:
    data = ("--new-tokens", NEW_TOKENS, "--held-out", 2, "--depths", DEPTHS, "--device", "cpu", "--workers", 1)
    steps = ("--batch-tokens", 128, "--micro-tokens", 128, "--evaluate-tokens", 10**6, "--warmup-steps", 2)
    quick = ("--lr", "0.02,0.01")
    places = ("--model", TARGET, "--work", work, "--out", out)
    return run_command("train", kind, *places, *data, *steps, *quick, *OWN[kind], *arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_learns_goes_on_and_drafts_in_the_engine(kind: str, collected: Path, work: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    first = train(kind, work, out, "--stage", "train", "--tokens", 256, "--decay-share", 0)
    assert first.code == 0, first.err
    before = torch.load(work / kind / "latest.pt", weights_only=True)["progress"]["losses"]
    goes_on = train(kind, work, out, "--stage", "train", "--tokens", 3000, "--decay-share", 0, "--noise", 0)
    assert goes_on.code == 0, goes_on.err
    assert "goes on at 0.00 M tokens" in goes_on.out
    after = torch.load(work / kind / "latest.pt", weights_only=True)["progress"]["losses"]
    assert len(after) == DEPTHS
    assert all(new < 0.7 * old for new, old in zip(after, before, strict=True))

    measured = train(kind, work, out, "--stage", "measure", "--measure", collected / "asked.jsonl")
    assert measured.code == 0, measured.err
    facts = json.loads((out / "training.json").read_text())
    card = (out / "README.md").read_text()
    assert f'"method": "{kind}", "model": "FOLDER"' in card
    assert "last hidden state" in card
    expected = facts["measured"]["all"]["acceptance_length"]
    assert expected > 1.3

    asked = list(read_conversations(work / "measured.jsonl"))
    prompts = [{"prompt_token_ids": list(c.prompt)} for c in asked]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    speculation = {"model": str(out), "policy": "constant", "num_speculative_tokens": DEPTHS, "prompt_lookup_max": 0}
    with closing(LLM(str(TARGET), speculative_config=speculation, max_model_len=128, max_num_seqs=12)) as llm:
        results = llm.generate(prompts, params)
    assert [tuple(r.outputs[0].token_ids) for r in results] == [tuple(c.answer) for c in asked]  # by plain decoding
    # A verification without room for all drafts, at an answer's end, is not counted alike: hence not quite the same.
    seen = [r.outputs[0].metrics for r in results]
    emitted, drafts = sum(m.draft_emitted for m in seen), sum(m.drafts for m in seen)
    assert emitted / drafts == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_checkpoint_drafts_as_the_trained_head_does(kind: str, work: Path, target: Model, tmp_path: Path) -> None:
    """What the engine reads from the exported folder gives the logits that training saw, at every depth."""
    assert train(kind, work, tmp_path / "head", "--stage", "train", "--tokens", 512).code == 0
    basis = load_basis(work)
    head = KINDS[kind].head(basis.cast(torch.float32), 0)
    head.load(load_file(tmp_path / "head" / "model.safetensors"), "test")
    one = Cache(work / "states").shards[0].example(0)
    text = one.tokens.tolist()
    states = states_of(target, text, (target.config.num_layers + 1,))
    batch = join([one])
    start = int(batch.chain_rows[0])
    with torch.no_grad():
        for j, depth in enumerate(head.unroll(batch, DEPTHS)):
            wanted = depth.read[0].float() @ head.output.T.float()
            if kind == "eagle":
                loaded = load_head("eagle", str(tmp_path / "head"), target)
                got = logits_of(loaded, states, text[: start + 2], text[start + 2 : start + 2 + j], 99)[-1]
            else:
                got = state_logits(kind, tmp_path / "head", target, states[start], text[start + 1 : start + 2 + j])
            # The cache holds states in bfloat16, and the target ran in bfloat16 where the processor has it.
            assert torch.corrcoef(torch.stack([got, wanted]))[0, 1] > 0.995
            assert wanted[got.argmax()] > wanted.max() - 0.05 * wanted.std() * 4


def state_logits(kind: str, folder: Path, target: Model, state: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    heads: StateHeads = {"medusa": load_medusa, "mlp_speculator": load_mlp_speculator}[kind](str(folder), target)
    state, logits = heads.begin(state[None]), torch.empty(0)
    for j, token in enumerate(tokens):
        state, logits = heads.run(j, state, torch.tensor([token]))
    return logits[0]


def test_another_network_or_other_states_are_refused(work: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    assert train("medusa", work, out, "--stage", "train", "--tokens", 64).code == 0
    refused = train("medusa", work, out, "--stage", "train", "--tokens", 128, "--layers", 3)
    assert refused.code == 2
    assert "was trained with options = {'heads': 3, 'layers': 2}, expected {'heads': 3, 'layers': 3}" in refused.err
    places = ("--model", TARGET, "--work", work, "--out", out, "--stage", "train")
    refused = run_command("train", "eagle3", *places)
    assert refused.code == 2
    assert "with the hidden states [9], expected [2, 4, 5]; use another folder" in refused.err
    measured = train("mlp_speculator", work, out, "--stage", "measure", "--measure", tmp_path / "work" / "basis.json")
    assert measured.code == 2
    assert "emb.0.weight is nothing, expected [4096, 32]" in measured.err


def test_options_that_mean_nothing_to_a_kind_are_not_there() -> None:
    shown = {kind: CliRunner().invoke(app, [kind, "--help"], env={"COLUMNS": "200"}).output for kind in KINDS}
    assert "--draft-vocab" in shown["medusa"]
    assert not any("--draft-vocab" in shown[kind] for kind in ("eagle", "mlp_speculator"))
    assert all("--start-from" not in text for text in shown.values())
    assert "Heads, each of which drafts a token" in shown["medusa"]
    assert "--inner-dim" in shown["mlp_speculator"]
