"""deploy/serve.yaml holds options that there are, and its remarks are true."""

from __future__ import annotations

import json
import re

from dynaspec.model.batch import BLOCK_SIZE
from unit.deploy.options import example, example_engine, example_server
from unit.deploy.serve_command import DEPLOY, DOCS, ROOT


def kv_bytes_per_token(model: str) -> int:
    config = json.loads((ROOT / "tests" / "models" / model / "config.json").read_text())
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4


def test_every_option_is_used() -> None:
    engine, server = example_engine(), example_server()
    set_ = engine.model_fields_set | server.model_fields_set
    assert example().keys() - set_ == {"draft_model"}
    assert "api_key" not in set_


def test_what_is_said_of_memory_is_so() -> None:
    per_token = kv_bytes_per_token("target") + kv_bytes_per_token("draft")
    length = json.loads((ROOT / "tests/models/target/config.json").read_text())["max_position_embeddings"]
    mebibytes = per_token * length / 2**20
    memory = example_engine().kv_cache_memory
    assert memory is not None
    room = memory // (per_token * BLOCK_SIZE) // (length // BLOCK_SIZE)
    said = (DEPLOY / "serve.yaml").read_text()
    assert f"{length} tokens, takes {mebibytes:.0f} MiB: this is room for {room} of them" in said
    sizing = re.sub(r"\s+", " ", (DOCS / "serving.md").read_text())
    assert f"= {per_token} bytes, so {mebibytes:.0f} MiB for {length} tokens" in sizing
