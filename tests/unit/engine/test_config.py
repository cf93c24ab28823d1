from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dynaspec.contract.errors import ConfigError
from dynaspec.engine.config import EngineConfig, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("512M", 512 * 2**20),
        ("4GiB", 4 * 2**30),
        ("1.5g", 3 * 2**29),
        (" 2kb ", 2048),
        ("1T", 2**40),
        ("1e3", 1000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "four", "1.2.3M", "12X", "nan", "inf", "-", "0x10"])
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_a_configuration_from_keywords() -> None:
    config = EngineConfig.build(
        model="m", kv_cache_memory="1M", speculative_config={"method": "ngram", "num_speculative_tokens": 3}
    )
    assert config.kv_cache_memory == 2**20
    assert config.speculative_config is not None
    assert config.speculative_config.num_speculative_tokens == 3
    assert EngineConfig.build(model="m").speculative_config is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 3}, "unknown option 'max_num_seq'.*max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": "many"}, "max_num_seqs.*'many'"),
        ({"dtype": "int8"}, "dtype.*'int8'"),
        ({"quantization": "awq"}, "quantization: 'awq' is not available; expected 'int8' or 'int4'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype.*'auto', 'float32' or 'bfloat16'.*'fp8'"),
        ({"device": "tpu"}, "device"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"kv_cache_memory": "much"}, "kv_cache_memory.*not a size"),
        ({"kv_cache_memory": "-1M"}, "kv_cache_memory"),
        ({"kv_cache_memory": "inf"}, "kv_cache_memory"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 17}, "at least one row for each request"),
        ({"model": ""}, "model"),
        ({"seed": -1}, "seed"),
        ({"speculative_config": {"method": "magic"}}, "magic"),
    ],
)
def test_configurations_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.build(**{"model": "m"} | options)


def test_a_configuration_does_not_change() -> None:
    config = EngineConfig.build(model="m")
    with pytest.raises(ValidationError):
        config.max_num_seqs = 3
