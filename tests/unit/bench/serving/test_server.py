"""Settings of a load test."""

from __future__ import annotations

import pytest

from dynaspec.bench.serving.server import LoadSettings, LoadWorkload, Reported, Target, Traffic, base_address
from dynaspec.contract.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, "127.0.0.1", 8011), "http://127.0.0.1:8011"),
        ((None, "::1", 8011), "http://[::1]:8011"),
        (("https://host/llm/v1/", "x", 1), "https://host/llm"),
        (("http://host:1/", "x", 1), "http://host:1"),
    ],
)
def test_base_address(given, expected):
    assert base_address(*given) == expected


def test_url():
    assert Target(root="http://h").url == "http://h/v1/completions"
    assert Target(root="http://h", backend="openai-chat").url == "http://h/v1/chat/completions"
    assert Target(root="http://h", endpoint="/api/completions").url == "http://h/api/completions"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Target(root="localhost:8000"), "base URL is 'localhost:8000'"),
        (lambda: Target(root="http://h", backend="triton"), "backend is 'triton'; expected openai"),
        (lambda: Target(root="http://h", endpoint="/v1/embeddings"), "expected a path that ends with completions"),
        (
            lambda: Target(root="http://h", backend="openai-chat", endpoint="/v1/completions"),
            "ends with chat/completions",
        ),
        (lambda: LoadWorkload(num_prompts=0), "prompts are 0"),
        (lambda: LoadWorkload(output_len=0), "output tokens 0"),
        (lambda: LoadWorkload(range_ratio=1.0), "range ratio is 1"),
        (lambda: Traffic(request_rate=0.0), "request rate is 0"),
        (lambda: Traffic(request_rate=float("nan")), "request rate is nan"),
        (lambda: Traffic(burstiness=-1.0), "burstiness -1"),
        (lambda: Traffic(max_concurrency=0), "concurrency is 0"),
        (lambda: Traffic(num_warmups=-1), "warm-up requests is -1"),
        (lambda: Reported(metrics=("ttft", "speed")), "have 'speed'; expected ttft"),
        (lambda: Reported(percentiles=(101.0,)), "a percentile is 101"),
        (lambda: Reported(goals_ms={"itl": 3}), "have 'itl'; expected ttft, tpot, e2el"),
        (lambda: Reported(goals_ms={"ttft": -3}), "ttft is -3 ms"),
        (lambda: LoadSettings(target=Target(root="http://h"), fields={"n": 2}), "extra body has n=2; expected 1"),
        (lambda: LoadSettings(target=Target(root="http://h"), fields={"stream": False}), "stream=False; expected True"),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
