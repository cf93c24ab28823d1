"""Files that results go to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.result_output import make_folder, write_json


def test_results_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created"):
        make_folder(tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_json(tmp_path / "none" / "out.json", {})


def test_a_path_is_written_as_its_text(tmp_path):
    write_json(tmp_path / "out.json", {"options": {"folder": Path("a/b")}, "é": 1})
    assert json.loads((tmp_path / "out.json").read_text("utf-8")) == {"options": {"folder": "a/b"}, "é": 1}
