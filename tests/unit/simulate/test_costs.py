from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import ProposerTraits
from dynaspec.control.profile import Profile
from dynaspec.simulate.costs import CurveCosts, PrefillChunk, ProfileCosts, step_load
from dynaspec.simulate.roofline import GPUS, MODELS, Efficiency, RooflineCosts, find_gpu, find_model
from unit.control.seam import H100_PROFILE

TRAITS = ProposerTraits("draft_model")
LLAMA = find_model("llama-3.1-8b")
SMALL = find_model("llama-3.2-1b")
H100 = find_gpu("H100")


def load(batch=1, k=0, context=1000, chunks=(), ragged=None):
    lens = np.full(batch, k) if ragged is None else np.array(ragged)
    contexts = np.full(len(lens), context)
    return step_load(TRAITS, contexts, lens, lens, np.minimum(lens, 1), chunks)


def roofline(target=LLAMA, drafter=SMALL, gpu=H100, **fields):
    return RooflineCosts(target, drafter, gpu, **fields)


def seconds(costs, **fields):
    return costs.time(load(**fields)).step_s


# --- load ---------------------------------------------------------------------------------------------------------


def test_work_of_a_ragged_step():
    work = step_load(
        TRAITS,
        context=np.array([10, 20, 30]),
        drafted=np.array([3, 0, 1]),
        verified=np.array([2, 0, 1]),
        ingested=np.array([1, 0, 5]),
        chunks=[PrefillChunk(4, 3)],
    )
    assert work.work.rows_per_pass == (6, 1, 1)
    assert work.drafting == (2, 1, 1)
    assert work.draft_context == (40, 11, 12)
    assert (work.work.verify_rows, work.work.prefill_rows, work.requests) == (6, 3, 3)
    # Rows see 10, 11, 12; 20; 30, 31; and 5, 6, 7 of the prompt.
    assert work.work.kv_tokens == 33 + 20 + 61 + 18
    assert work.context == 12 + 20 + 31 + 7


def test_a_drafter_that_only_catches_up_runs_one_pass():
    caught = step_load(TRAITS, np.array([900]), np.array([0]), np.array([0]), np.array([512]))
    assert caught.work.rows_per_pass == (512,)
    assert caught.drafting == (0,)


@pytest.mark.parametrize(("passes", "rows"), [("none", ()), ("one", (2,)), ("per_token", (2, 2, 1, 1))])
def test_passes_by_kind_of_proposer(passes, rows):
    traits = ProposerTraits("p", passes_per_draft=passes)
    lens = np.array([4, 2])
    assert step_load(traits, np.array([5, 5]), lens, lens, np.array([1, 1])).work.rows_per_pass == rows


# --- roofline -----------------------------------------------------------------------------------------------------


def test_the_weights_are_the_floor_of_a_step():
    ideal = Efficiency(compute=1.0, bandwidth=1.0, layer_s=0.0, step_s=0.0)
    costs = roofline(efficiency=ideal)
    one = seconds(costs, context=1)
    assert one == pytest.approx(2 * 8.03e9 / 3350e9, rel=0.001)
    # Below the ridge, rows are free; far above it, time is arithmetic.
    assert seconds(costs, batch=64, context=1) == pytest.approx(one, rel=0.01)
    rows = 2048
    prefill = seconds(costs, chunks=(PrefillChunk(0, rows),), batch=1, context=1)
    assert prefill == pytest.approx(rows * 2 * 8.03e9 / 989.4e12, rel=0.1)


@pytest.mark.parametrize("gpu", GPUS)
def test_more_work_never_takes_less_time(gpu):
    costs = RooflineCosts(find_model("qwen3-1.7b"), find_model("qwen3-0.6b"), find_gpu(gpu))
    for field, values in (("batch", (1, 2, 8, 64, 512)), ("k", (0, 1, 2, 8)), ("context", (1, 100, 10_000))):
        times = [seconds(costs, **({"batch": 8, "k": 2, "context": 500} | {field: value})) for value in values]
        assert times == sorted(times), field
        assert times[0] < times[-1], field


@pytest.mark.parametrize("column", ["tflops", "bandwidth", "link"])
def test_a_better_gpu_is_never_slower(column):
    better = replace(H100, **{column: 2 * getattr(H100, column)})
    for fields in ({"batch": 1}, {"batch": 64, "k": 4}, {"chunks": (PrefillChunk(0, 4096),)}):
        assert seconds(roofline(gpu=better, gpus=2), **fields) <= seconds(roofline(gpus=2), **fields)


def test_tensor_parallelism_divides_the_work_and_pays_for_talking():
    llama = find_model("llama-3.1-70b")
    four, eight = (RooflineCosts(llama, SMALL, H100, gpus=n) for n in (4, 8))
    assert seconds(eight, batch=1) < seconds(four, batch=1)
    assert seconds(eight, batch=1) > seconds(four, batch=1) / 2
    assert eight.kv_tokens > four.kv_tokens


def test_a_small_drafter_is_better_off_on_one_gpu():
    llama = find_model("llama-3.1-70b")
    alone = RooflineCosts(llama, SMALL, H100, gpus=8, draft_gpus=8)
    spread = RooflineCosts(llama, SMALL, H100, gpus=8, draft_gpus=1)
    assert spread.time(load(k=4)).draft_s != alone.time(load(k=4)).draft_s
    assert spread.time(load(k=4)).verify_s == alone.time(load(k=4)).verify_s


def test_memory_of_weights_and_kv():
    costs = roofline()
    expected = (80e9 * 0.9 - 2 * (8.03e9 + 1.236e9)) / (2 * 2 * (32 * 8 * 128 + 16 * 8 * 64))
    assert costs.kv_tokens == pytest.approx(expected, abs=1)
    with pytest.raises(ConfigError, match="the weights take 141 GB on each of 1 × H100, of which 72 GB are usable"):
        RooflineCosts(find_model("llama-3.1-70b"), None, H100)
    with pytest.raises(ConfigError, match="the drafter has 4 GPUs and the target 2"):
        roofline(gpus=2, draft_gpus=4)


def test_experts_are_read_as_rows_hit_them():
    moe = find_model("deepseek-v3")
    assert moe.read(1) == pytest.approx(37e9)
    assert moe.read(8) < 8 * moe.read(1)
    assert moe.read(4096) == pytest.approx(671e9, rel=1e-3)
    assert moe.flops == pytest.approx(2 * 37e9)


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_models_are_plausible(model):
    assert (model.active_billions or model.billions) <= model.billions
    # Of a dense decoder layer, 12 · hidden² parameters, give or take its width and grouped attention.
    if model.active_billions is None and model.layers > 1:
        assert 5 < 1e9 * model.billions / (model.layers * model.hidden**2) < 30


def test_pass_costs_ascend():
    measured = roofline().pass_costs()
    for curve in (measured.target, measured.drafters[0]):
        assert [rows for rows, _ in curve] == sorted({rows for rows, _ in curve})
        assert [s for _, s in curve] == sorted(s for _, s in curve)


@pytest.mark.parametrize(("find", "kind"), [(find_gpu, "GPU"), (find_model, "model")])
def test_unknown_names_list_the_known_ones(find, kind):
    with pytest.raises(ConfigError, match=f"the {kind} 'abacus' is not known; expected one of"):
        find("abacus")


# --- profile ------------------------------------------------------------------------------------------------------

PROFILE = Profile(
    batch_stats={1: {0: 5.0, 1: 6.0, 3: 9.0}, 8: {0: 6.0, 1: 7.0, 3: 13.0}, 16: {0: 8.0, 1: 12.0, 3: 20.0}},
    acceptance_rate_per_pos=(0.8, 0.6, 0.4),
    max_num_speculative_tokens=3,
)


@pytest.mark.parametrize("batch", [1, 4, 8, 12, 16, 40])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_equal_drafts_cost_what_the_profile_says(batch, k):
    assert 1e3 * seconds(ProfileCosts(PROFILE), batch=batch, k=k) == pytest.approx(PROFILE.itl_ms(batch, k))


def test_ragged_drafts_lie_between():
    costs = ProfileCosts(PROFILE)
    ragged = seconds(costs, ragged=[3] + [0] * 15)
    assert seconds(costs, batch=16, k=0) < ragged < seconds(costs, batch=16, k=3)


def test_prompts_cost_as_much_as_rows():
    # From batch 1 to 16, 3 ms for 15 rows.
    extra = seconds(ProfileCosts(PROFILE), chunks=(PrefillChunk(0, 100),)) - seconds(ProfileCosts(PROFILE))
    assert 1e3 * extra == pytest.approx(20.0)
    given = ProfileCosts(PROFILE, prefill_ms=0.5)
    assert 1e3 * (seconds(given, chunks=(PrefillChunk(0, 100),)) - seconds(given)) == pytest.approx(50.0)


def test_a_profile_that_falls_never_makes_a_step_free():
    odd = Profile({1: {0: 50.0, 1: 1.0}, 8: {0: 2.0, 1: 3.0}}, (0.5,), 1)
    assert seconds(ProfileCosts(odd), ragged=[1] + [0] * 7) == pytest.approx(1e-3)


# --- curves -------------------------------------------------------------------------------------------------------


def test_curves_between_and_beyond():
    costs = CurveCosts(PassCosts(target=((1, 1.0), (4, 4.0), (8, 5.0)), drafters=(((1, 0.5), (3, 0.4)),)))
    times = [seconds(costs, batch=batch) for batch in (1, 2, 4, 6, 8, 12)]
    assert times == pytest.approx([1.0, 2.0, 4.0, 4.5, 5.0, 6.0])
    # A falling end is noise: it is not drawn on.
    assert costs.time(load(batch=8, k=1)).draft_s == pytest.approx(0.4)
    assert costs.time(load(batch=2, k=3)).draft_s == pytest.approx(3 * 0.45)


def write(tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_curves_from_a_file(tmp_path):
    costs = CurveCosts.load(
        write(tmp_path, {"target": [[1, 0.01], [8, 0.02]], "drafter": [[1, 1e-3]], "overhead_s": 0.5})
    )
    assert costs.time(load(k=2)).step_s == pytest.approx(0.5 + 0.01 + 0.01 * 2 / 7 + 2e-3)
    assert costs.pass_costs().target == ((1, 0.01), (8, 0.02))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "are no JSON"),
        ([], "no JSON object"),
        ({}, "the target curve is empty"),
        ({"target": [[1, 1]], "curve": 1}, "the key 'curve' is unknown"),
        ({"target": [[1]]}, "target is no list of"),
        ({"target": [[2, 1.0], [1, 1.0]]}, "expected them to ascend from 1"),
        ({"target": [[1, -1.0]]}, "expected seconds above 0"),
        ({"target": [[1, 1.0]], "overhead_s": "x"}, "overhead_s is 'x'"),
    ],
)
def test_malformed_curves(tmp_path, content, said):
    with pytest.raises(ConfigError) as error:
        CurveCosts.load(write(tmp_path, content))
    assert said in str(error.value)
    assert "costs.json" in str(error.value)


# --- how far the roofline is off ----------------------------------------------------------------------------------


def test_the_roofline_is_near_a_published_measurement():
    """Llama 3.1 8B with EAGLE on one H100 (the file says where from); nothing was fitted to it."""
    published = Profile.load(H100_PROFILE)
    costs = RooflineCosts(LLAMA, find_model("eagle-llama-3.1-8b"), H100)
    for batch, row in published.batch_stats.items():
        for k, measured in row.items():
            assert 1e3 * seconds(costs, batch=batch, k=k, context=600) == pytest.approx(measured, rel=0.2), (batch, k)
