from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.weights import Checkpoint, find_checkpoint, read_json


def test_reads_a_single_file(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert "a" in checkpoint
    assert torch.equal(checkpoint.take("a", (2, 3)), torch.arange(6.0).view(2, 3))


def test_reads_shards_by_their_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "two.safetensors")
    save_file({"c": torch.ones(3)}, tmp_path / "other.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.take("b", (3,)).sum() == 3
    assert "c" not in checkpoint


def test_missing_shard(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match="lacks gone"):
        Checkpoint(tmp_path)


def test_index_without_map(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        Checkpoint(tmp_path)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="of other weight formats only GGUF is read"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a safetensors file at all"])
def test_corrupt_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        Checkpoint(tmp_path)


def test_truncated_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-50])
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        Checkpoint(tmp_path)


def test_missing_tensor_and_wrong_shape(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks the tensor b, of shape \[4\]"):
        checkpoint.take("b", (4,))
    with pytest.raises(CheckpointError, match=r"a has shape \[2, 3\].*needs \[3, 2\]"):
        checkpoint.take("a", (3, 2))


def test_tensors_left_over(tmp_path: Path) -> None:
    names = ("a", "tied", "h.0.attn.masked_bias", "model.rotary_emb.inv_freq")
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    checkpoint.ignore(["tied", "absent"])
    with pytest.raises(CheckpointError, match="1 tensors that its config has no place for, such as a"):
        checkpoint.check_all_taken()
    checkpoint.take("a", (2,))
    checkpoint.check_all_taken()


def test_finding(tmp_path: Path) -> None:
    assert find_checkpoint(str(tmp_path)) == tmp_path
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        find_checkpoint(str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="there is no directory"):
        find_checkpoint(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError("disk full\nmore"), r"it could not be fetched from the Hugging Face hub \(OSError: disk full\)"),
        (errors.LocalEntryNotFoundError("Got: long"), "the Hugging Face hub cannot be reached"),
        (errors.RepositoryNotFoundError("404", response=Mock()), "the Hugging Face hub has no such repository, or"),
        (
            errors.RevisionNotFoundError("404", response=Mock()),
            "the Hugging Face hub's repository has no revision 'v2'",
        ),
        (errors.GatedRepoError("403", response=Mock()), "the Hugging Face hub gives that repository only to those"),
    ],
)
def test_why_a_model_is_not_there(monkeypatch: pytest.MonkeyPatch, error: Exception, why: str) -> None:
    asked = {}

    def refuse(repo: str, **options: object) -> str:
        asked.update(options, repo=repo)
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    sentence = rf"^there is no directory 'someone/model', and {why}.*; expected a checkpoint's directory, [^\n]*hub id$"
    with pytest.raises(CheckpointError, match=sentence):
        find_checkpoint("someone/model", "v2")
    assert asked["revision"] == "v2"
    assert "*.bin" not in asked["allow_patterns"]


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_bad_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"not valid JSON|expected a JSON object"):
        read_json(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"has no other\.json"):
        read_json(tmp_path / "other.json")
