"""What vLLM's sides decode."""

from __future__ import annotations

from hosts_vllm import of_round
from vllm_side import Load


def test_no_round_repeats_the_lengths_of_the_one_before() -> None:
    load: Load = {"concurrency": 2, "prompts": [[5, 6, 7, 8], [9, 10]], "max_tokens": 4, "temperature": 0.0}
    assert of_round(load, 0) == load
    assert of_round(load, 1)["prompts"] == [[6, 7, 8], [10]]
    assert of_round(load, 5)["prompts"] == [[8], [10]]  # something is left of each
    assert load["prompts"] == [[5, 6, 7, 8], [9, 10]]
