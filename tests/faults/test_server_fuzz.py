"""The server against its own OpenAPI document: whatever is asked, the answer is one that the document names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from dynaspec import AsyncLLM
from support.checkpoints import Pair
from unit.server.serving import make_app

WITH_BODY = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
WITHOUT_BODY = ("/v1/models", "/v1/models/{model}", "/health", "/ready", "/ping", "/version", "/metrics")
FITTING = [("POST", path, GenerationMode.POSITIVE) for path in WITH_BODY] + [
    ("GET", path, GenerationMode.POSITIVE) for path in WITHOUT_BODY
]
UNFITTING = [("POST", path, GenerationMode.NEGATIVE) for path in WITH_BODY]
"""Endpoints without a body take everything."""
CHECKS = [
    *(not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance),
    negative_data_rejection,
]
PATIENCE_S = 600.0


@pytest.fixture(scope="module")
def llm(tiny: Pair) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        tiny.target,
        speculative_config={"model": tiny.drafter, "policy": "constant", "num_speculative_tokens": 3},
        max_num_seqs=8,
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def document(llm: AsyncLLM) -> schemathesis.BaseSchema:
    """Of an app in the same process; its cases are asked there."""
    return schemathesis.openapi.from_asgi("/openapi.json", make_app(llm))


def test_every_endpoint_of_the_document_is_asked(document: schemathesis.BaseSchema) -> None:
    found = {(one.ok().method.upper(), one.ok().path) for one in document.get_all_operations()}
    assert found == {(method, path) for method, path, _ in FITTING}


@pytest.mark.parametrize(("method", "path", "mode"), [*FITTING, *UNFITTING])
def test_answers_are_as_documented(
    document: schemathesis.BaseSchema, llm: AsyncLLM, method: str, path: str, mode: GenerationMode
) -> None:
    @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS, timeout=PATIENCE_S)

    ask()
    seen = asyncio.run(llm.snapshot())
    assert (seen.running, seen.waiting, seen.counts.proposer_faults) == (0, 0, 0)
