from __future__ import annotations

import pytest

from dynaspec.bench.serving.counters import SpecCounters, read_counters


def page(namespace: str, drafts: int, drafted: int, per_position: tuple[int, ...]) -> str:
    lines = [
        "# HELP other Something else",
        "# TYPE other gauge",
        "other 3",
        f'{namespace}:spec_decode_num_drafts_total{{engine="0"}} {drafts}',
        f'{namespace}:spec_decode_num_drafts_total{{engine="1"}} 1.0',
        f'{namespace}:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}',
        f'{namespace}:spec_decode_num_draft_tokens_created{{engine="0"}} 1.7e9',
        f'{namespace}:spec_decode_num_accepted_tokens_total{{engine="0"}} {sum(per_position)}',
    ]
    for position, accepted in enumerate(per_position):
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        lines.append(f'{namespace}:{name}{{engine="0",position="{position}"}} {accepted}')
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("namespace", ["dynaspec", "vllm"])
def test_difference(namespace):
    before = read_counters(page(namespace, 9, 30, (8, 4)))
    after = read_counters(page(namespace, 19, 60, (16, 10, 2)))
    assert before == SpecCounters(10, 30, 12, {0: 8, 1: 4}), "all engines together"
    during = after - before
    assert during == SpecCounters(10, 30, 16, {0: 8, 1: 6, 2: 2})
    assert during.acceptance_rate == pytest.approx(16 / 30)
    assert during.acceptance_length == pytest.approx(2.6)
    assert during.rates_per_position == pytest.approx([0.8, 0.6, 0.2])


def test_ours_come_first():
    assert read_counters(page("vllm", 9, 30, (8,)) + page("dynaspec", 1, 2, (1,))).draft_tokens == 2


@pytest.mark.parametrize("text", ["", "python_info 1\n", "<html>no metrics</html>"])
def test_no_counters(text):
    assert read_counters(text) is None


def test_nothing_drafted():
    nothing = read_counters(page("vllm", 0, 0, ())) - read_counters(page("vllm", 0, 0, ()))
    assert (nothing.acceptance_rate, nothing.acceptance_length, nothing.rates_per_position) == (None, None, [])
