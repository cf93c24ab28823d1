"""deploy/serve.yaml holds options that there are, and its remarks are true."""

from __future__ import annotations

import re

from dynaspec.model.batch import BLOCK_SIZE
from unit.deploy.options import example, example_engine, example_server
from unit.deploy.serve_command import DEPLOY, DOCS

FLOAT = 4
TARGET = 2 * 30 * 3 * 64 * FLOAT
"""KV bytes of a token: keys and values, layers, KV heads, their size."""
HEAD = 2 * 1 * 3 * 64 * FLOAT
STATES = 3 * 576 * FLOAT
"""The hidden states that the head reads."""


def test_every_option_is_used() -> None:
    engine, server = example_engine(), example_server()
    set_ = engine.model_fields_set | server.model_fields_set
    assert example().keys() - set_ == {"draft_model"}
    assert "api_key" not in set_


def test_what_is_said_of_memory_is_so() -> None:
    per_token = TARGET + HEAD + STATES
    length = example_engine().max_model_len
    assert length is not None
    mebibytes = per_token * length / 2**20
    memory = example_engine().kv_cache_memory
    assert memory is not None
    room = memory // (per_token * BLOCK_SIZE) // (length // BLOCK_SIZE)
    said = (DEPLOY / "serve.yaml").read_text()
    assert f"{length} tokens, takes {mebibytes:.0f} MiB: this is room for {room} of them" in said
    sizing = re.sub(r"\s+", " ", (DOCS / "serving.md").read_text())
    assert f"= {per_token} bytes, so {mebibytes:.0f} MiB for {length} tokens" in sizing
