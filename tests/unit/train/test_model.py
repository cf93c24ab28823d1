"""A drafter for a target that exists already."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.nn.functional as F

from dynaspec import LLM, SamplingParams
from dynaspec.contract.errors import CheckpointError, ConfigError
from dynaspec.train.data import TokenSet, load_tokenizer, train_tokenizer
from dynaspec.train.distill import Distillation, Teacher, coarse_divergence
from dynaspec.train.facts import OF_A_RUN
from dynaspec.train.model import NextToken, build, fingerprint, read_shape
from support.commands import run_command
from unit.train.conftest import TINY, save_checkpoint, source

TRAINED = {"provenance": {"device": "cpu (abacus)", "threads": 7}, "note": "Trained with beads.", "seed": 3,
           "seq_len": 99, "batch_rows": 5,
           "data": {"train_documents": {"code": 41}, "held_out_documents": {"code": 2}, "train_tokens": 1234,
                    "train_bytes": 5678}}  # fmt: skip


def lm(*arguments: object):
    return run_command("train", "lm", *arguments)


@pytest.fixture
def given(tmp_path):
    """A target whose tokenizer is not what the corpus would give."""
    tokenizer = train_tokenizer(["".join(source(i) for i in range(12)) + "abracadabra " * 99], TINY.vocab)
    saved = save_checkpoint(tmp_path / "saved", tokenizer, seed=3)
    return shutil.copytree(saved, tmp_path / "models" / "target")


@pytest.fixture
def options(library, gsm8k, given, tmp_path):
    sizes = ("--draft-size", "64,1,1,1,64", "--seq-len", 32, "--batch-rows", 2)
    limits = ("--draft-steps", 4, "--prompts", 4, "--prompts-per-kind", 2)
    writing = ("--prompt-tokens", 24, "--new-tokens", 12, "--generated-share", 1)
    places = ("--corpus", library, "--gsm8k", gsm8k, "--work", tmp_path / "work", "--out", tmp_path / "out")
    return ("--target", given, *places, *sizes, *limits, *writing, "--device", "cpu")


def describe(given):
    """``training.json`` as the target's own training leaves it."""
    count = sum(size for size in read_parameters(given).values())
    target = {"shape": {"layers": 2, "hidden": 32, "heads": 2, "head_dim": 16, "kv_heads": 1, "intermediate": 48,
                        "vocab": 300}, "parameters": count, "rates": {"matrix_lr": 0.5, "other_lr": 0.25},
              "steps": 77, "tokens": 88, "minutes": 9.0, "last_training_loss": 6.0}  # fmt: skip
    (given.parent / "training.json").write_text(json.dumps({**TRAINED, "target": target, "draft": {"of": "before"}}))
    return target


def read_parameters(folder):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_drafter_alone_is_trained(options, given, tmp_path):
    kept, before = describe(given), files(given)
    result = lm(*options)
    assert result.code == 0, result.err
    assert files(given) == before
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {"draft", "training.json", "evaluation.json"}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / "draft" / name).read_bytes() == before[name]
    shape = read_shape(out / "draft")
    assert (shape.hidden, shape.vocab, shape.positions) == (64, TINY.vocab, TINY.positions)

    training = json.loads((out / "training.json").read_text())
    assert training["target"] == {**TRAINED, **kept}
    draft = training["draft"]
    assert draft["given_target"] == "../models/target"
    assert draft["continuations"]["documents"] == 4
    assert draft["continuations"]["tokens"] <= 4 * (24 + 12)
    recipe = draft["distillation"]
    assert (recipe["prompt_tokens"], recipe["new_tokens"], recipe["generated_share"]) == (24, 12, 1.0)
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert set(evaluation["held_out_loss"]) == {"target", "draft"}
    assert evaluation["prompts"] == {"code": 2, "maths": 2}
    card = (out / "draft" / "README.md").read_text()
    assert "Drafts for the target in `../models/target`" in card
    assert "dynaspec train lm --target TARGET" in card

    seen = TokenSet.load(tmp_path / "work" / f"given-{fingerprint(given)}" / "train.npz").tokens.tolist()
    assert "def f3" in load_tokenizer(given).decode(seen)

    llm = LLM(str(given), speculative_config={"model": str(out / "draft"), "policy": "constant"}, max_num_seqs=1)
    llm.generate("def f3", SamplingParams(temperature=0, max_tokens=8))
    assert llm.stats().mean_acceptance_length >= 1.0
    llm.close()


def test_the_target_beside_the_drafter_keeps_its_facts(options, given, tmp_path):
    kept, before = describe(given), files(given)
    for _ in range(2):  # the second time they come from what the first has written
        result = lm(*options, "--out", given.parent)
        assert result.code == 0, result.err
        training = json.loads((given.parent / "training.json").read_text())
        assert training["target"] == {**TRAINED, **kept}
        assert all(training[name] != TRAINED[name] for name in OF_A_RUN)
    now = files(given)
    card = now.pop("README.md").decode()
    assert now == before
    assert "77 steps" in card
    assert "Trained with beads." in card
    assert "Batches of 5 × 99 tokens" in card
    assert "(41 files)" in card
    assert "Held-out loss" in card
    assert "the demo target beside it" in (given.parent / "draft" / "README.md").read_text()


@pytest.mark.parametrize("told", ["nothing", "of another model", "of a target elsewhere"])
def test_what_is_not_known_of_a_target_is_not_said(told, options, given, tmp_path):
    count = sum(read_parameters(given).values())
    if told != "nothing":
        describe(given)
        path = given.parent / "training.json"
        facts = json.loads(path.read_text())
        if told == "of another model":
            facts["target"]["parameters"] += 1
        else:
            facts["draft"]["given_target"] = "../elsewhere"
        path.write_text(json.dumps(facts))
    for stage in ("prepare", "draft", "export"):
        result = lm(*options, "--stage", stage, "--out", given.parent)
        assert result.code == 0, result.err
    target = json.loads((given.parent / "training.json").read_text())["target"]
    assert target.keys() == {"shape", "parameters"}
    assert target["parameters"] == count
    assert target["shape"]["vocab"] == TINY.vocab
    assert not (given / "README.md").exists()


def test_what_was_made_for_one_target_does_not_serve_another(options, given, tokenizer, tmp_path):
    assert lm(*options, "--stage", "prepare").code == 0
    assert lm(*options, "--stage", "draft").code == 0
    other = save_checkpoint(tmp_path / "other", tokenizer, seed=4)
    result = lm(*options, "--stage", "draft", "--target", other)
    assert result.code == 2
    assert "train.npz' does not exist, expected what the stage 'prepare' writes" in result.err
    again = lm(*options, "--stage", "draft")
    assert "drafter, distillation: resumed at step 2" in again.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stage", "target"), "stage: got 'target' for a target that is given"),
        (("--vocab", 4096), "vocab: got 4096 for the drafter, expected the target's 300"),
        (("--target-steps", 4), "target: got it together with --target-steps"),
        (("--target-minutes", 1, "--extend"), "target: got it together with --target-minutes, --extend"),
        (("--target-until", "12:00"), "target: got it together with --target-until"),
        (("--target-size", "64,1,1,1,64", "--compile"), "target: got it together with --target-size, --compile"),
        (("--new-tokens", 120), "new_tokens: got 120 after prompts of 24, expected no more together than the target's"),
        (("--seq-len", 256), "seq_len: got 256, expected 2 to 128"),
        (("--generated-share", 2), "generated_share: got 2.0, expected 0 to 1"),
    ],
)
def test_what_does_not_go_with_a_target_is_refused(options, arguments, message):
    result = lm(*options, *arguments)
    assert result.code == 2
    assert f"error: {message}" in result.err
    assert "Traceback" not in result.out + result.err


def test_the_drafter_does_not_replace_its_target(options, given):
    draft = given.rename(given.parent / "draft")
    result = lm(*options, "--target", draft, "--out", draft.parent)
    assert result.code == 2
    assert "which the drafter would replace, expected another folder" in result.err


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_without_a_model_is_named(missing, options, given):
    (given / missing).unlink()
    result = lm(*options)
    assert result.code == 2
    assert "models/target', which holds no " in result.err
    assert "expected a folder with a Llama model in the Hugging Face layout" in result.err


def test_targets_that_cannot_be_drafted_for_are_named(given, tmp_path):
    with pytest.raises(CheckpointError, match=r"target: got .*nowhere', which is no folder, expected"):
        read_shape(tmp_path / "nowhere")
    path = given / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "eos_token_id": 2}))
    with pytest.raises(CheckpointError, match="ends texts with token 2, expected 0"):
        read_shape(given)
    path.write_text(json.dumps({**config, "architectures": ["Qwen2ForCausalLM"]}))
    with pytest.raises(CheckpointError, match=r"whose architectures are .*Qwen2.*, expected a folder with a Llama"):
        read_shape(given)


def test_a_shape_is_read_back(given):
    assert read_shape(given) == TINY


def test_a_fingerprint_is_that_of_the_files(given, tmp_path):
    copy = shutil.copytree(given, tmp_path / "copy")
    (copy / "README.md").write_text("a card")
    assert fingerprint(copy) == fingerprint(given)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        changed = shutil.copytree(given, tmp_path / name)
        (changed / name).write_bytes((changed / name).read_bytes() + b" ")
        assert fingerprint(changed) != fingerprint(given)


@pytest.fixture
def batch():
    return torch.randint(0, TINY.vocab, (2, 9), generator=torch.Generator().manual_seed(0))


def test_next_token_loss_is_that_of_transformers(batch):
    model = build(TINY, seed=1)
    expected = model(input_ids=batch, labels=batch).loss
    assert torch.allclose(NextToken(model)(batch), expected, atol=1e-5)


def test_distillation_mixes_divergence_and_cross_entropy(batch):
    target, drafter = build(TINY, seed=1), build(TINY, seed=2)
    with torch.no_grad():
        p = target(input_ids=batch[:, :-1]).logits.flatten(0, 1).log_softmax(-1)
        q = drafter(input_ids=batch[:, :-1]).logits.flatten(0, 1).log_softmax(-1)
    divergence = F.kl_div(q, p, log_target=True, reduction="batchmean")
    text = F.nll_loss(q, batch[:, 1:].flatten())
    got = Distillation(Teacher(target, k=TINY.vocab), drafter, weight=0.75)(batch)
    assert torch.allclose(got, 0.75 * divergence + 0.25 * text, atol=1e-3)
    got.backward()
    assert all(p.grad is None for p in target.parameters())
    assert drafter.model.embed_tokens.weight.grad is not None


def test_a_perfect_drafter_has_no_divergence(batch):
    target, drafter = build(TINY, seed=1), build(TINY, seed=1)
    assert abs(Distillation(Teacher(target, k=8), drafter, weight=1.0)(batch).item()) < 1e-4


def test_weight_is_checked():
    with pytest.raises(ConfigError, match=r"kl_weight: got 1\.5, expected 0 to 1"):
        Distillation(Teacher(build(TINY, 0)), build(TINY, 0), weight=1.5)


def test_divergence_counts_what_the_best_tokens_leave():
    p, q = torch.tensor([0.5, 0.2, 0.2, 0.1]), torch.tensor([0.4, 0.1, 0.3, 0.2])
    rest = (p[2:].sum() * (p[2:].sum() / q[2:].sum()).log()).item()
    expected = (p[:2] * (p[:2] / q[:2]).log()).sum().item() + rest
    got = coarse_divergence(p[None, :2].log(), q[None, :2].log()).item()
    assert got == pytest.approx(expected, abs=1e-6)


def test_the_target_is_asked_about_a_row_once(batch):
    teacher = Teacher(build(TINY, seed=1), k=4)
    first = teacher(batch[:, :-1])
    assert (first.ids.shape, teacher.rows) == ((2, 8, 4), 2)
    teacher._target = None
    again = teacher(batch[[1, 0, 1], :-1])
    assert torch.equal(again.ids, first.ids[[1, 0, 1]])
    assert torch.equal(again.log_probs, first.log_probs[[1, 0, 1]])


def test_a_row_twice_in_a_batch_is_one_row(batch):
    teacher = Teacher(build(TINY, seed=1), k=4)
    labels = teacher(batch[[0, 1, 0], :-1])
    assert teacher.rows == 2
    assert torch.equal(labels.ids[0], labels.ids[2])
