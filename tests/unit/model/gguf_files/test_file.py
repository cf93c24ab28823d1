from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.gguf.file import GgufFile


def write(path: Path, **keys: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.ones((1, 4), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_keys_and_tensors(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.gguf", whole=3, real=0.5, text="Öl", yes=True, numbers=[1, 2], alike=[7, 7], texts=["a", ""]
    )
    file = GgufFile(path)
    assert file.architecture == "llama"
    assert (file.get("whole", int), file.get("real", float), file.get("text", str)) == (3, 0.5, "Öl")
    assert (file.get("yes", bool), file.get("whole", float), file.get("alike", int)) == (True, 3.0, 7)
    assert (file.items("numbers", int), file.items("texts", str)) == ([1, 2], ["a", ""])
    assert file.get("none", int) is None
    assert file.items("none", int) is None
    first = file.tensors["first"]
    assert first.shape == (2, 3)
    assert file.data(first).view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert file.data(file.tensors["second"]).view(np.float16).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        ("text", int, "has 'some' for text; expected a whole number"),
        ("yes", int, "has True for yes; expected a whole number"),
        ("numbers", int, "has a list of 2 for numbers; expected a whole number"),
        ("none", str, "has no none; expected text"),
    ],
)
def test_values_of_another_kind(key: str, kind: type[Any], message: str, tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path / "a.gguf", text="some", yes=True, numbers=[1, 2]))
    with pytest.raises(CheckpointError, match=message):
        file.need(key, kind)


def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.gguf", text="some", numbers=[1, 2], texts=["a", "b"]).read_bytes()
    second = GgufFile(tmp_path / "a.gguf").tensors["second"]
    for length in range(second.start + second.size):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf (ends at byte|is not a readable|does not begin)"):
            GgufFile(tmp_path / "cut.gguf")
    (tmp_path / "cut.gguf").write_bytes(whole[: second.start + second.size - 1])
    with pytest.raises(CheckpointError, match="within or before the tensor second; expected bytes"):
        GgufFile(tmp_path / "cut.gguf")


def test_any_byte_may_be_wrong(tmp_path: Path) -> None:
    whole = bytearray(write(tmp_path / "a.gguf", text="some", numbers=[1, 2], texts=["a", "b"]).read_bytes())
    for at in range(len(whole) - 64):
        for value in (0x00, 0x7F, 0xFF):
            changed = whole.copy()
            changed[at] = value
            (tmp_path / "bad.gguf").write_bytes(changed)
            with suppress(CheckpointError):  # nothing else, but it may also be text or a number that could be right
                GgufFile(tmp_path / "bad.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable GGUF file"),
        (b"GGML" + bytes(60), "does not begin with GGUF"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(60), "is GGUF version 1; expected 2 or 3"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(60), "expected 2 or 3, little-endian"),
    ],
)
def test_other_files(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(tmp_path / "a.gguf")
