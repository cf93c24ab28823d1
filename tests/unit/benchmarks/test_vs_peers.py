"""The comparison with other engines, without any of them: fake peers in real processes, and the pure parts."""

from __future__ import annotations

import argparse
import json
import os
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import vs_peers
from dynaspec.contract.errors import ConfigError
from peers import report
from peers.common import ended, keep_running
from peers.environments import Recipe, SetUpError, interpreter, is_ready, kept, logged, make, package_name
from peers.process import PeerError, Process
from peers.results import Agreement, Results, Turn, agreement, produced, without_end
from vs_peers import OURS, PEERS, PLAIN, Sides

WORKER = Path(vs_peers.__file__).with_name("peers") / "worker.py"
FAKE = """
import os, sys, types
sys.path.append({benchmarks!r})

class Side:
    versions = {{"fake": "1.0"}}
    def prepare(self, at_once):
        print("a library prints this")
        if at_once == 8:
            raise ValueError("only one at a time\\nand more")
    def decode(self, workload):
        if workload["max_tokens"] == 99:
            os._exit(7)
        return [prompt[: workload["max_tokens"]] for prompt in workload["prompts"]]
    def rest(self):
        pass

fake = types.ModuleType("peers.fake")
fake.load = {load}
sys.modules["peers.fake"] = fake
sys.argv = ["worker.py", "fake", "{{}}"]
sys.path.insert(0, {folder!r})
import worker
worker.main()
"""


def workload(at_once=1, max_tokens=2):
    return {"prompts": [[1, 2, 3], [4, 5, 6]], "at_once": at_once, "max_tokens": max_tokens, "eos": [0]}


@pytest.fixture
def started(tmp_path):
    processes = []

    def start(load="lambda setting: Side()"):
        text = FAKE.format(benchmarks=str(WORKER.parents[1]), folder=str(WORKER.parent), load=load)
        process = Process([sys.executable, "-c", text], dict(os.environ), tmp_path / "log")
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.close()


def test_a_worker_answers_whatever_its_libraries_print(started):
    process = started()
    assert process.wait_ready(60) == {"fake": "1.0"}
    seconds, answers = process.run(workload(), 60)
    assert answers == [[1, 2], [4, 5]]
    assert seconds >= 0


def test_a_workload_that_fails_is_told_and_the_worker_lives_on(started):
    process = started()
    process.wait_ready(60)
    with pytest.raises(PeerError, match=r"^ValueError: only one at a time$"):
        process.run(workload(at_once=8), 60)
    assert process.run(workload(), 60)[1] == [[1, 2], [4, 5]]


def test_an_engine_that_is_not_built_says_why(started):
    process = started('lambda setting: (_ for _ in ()).throw(ImportError("no such library"))')
    with pytest.raises(PeerError, match="ImportError: no such library"):
        process.wait_ready(60)


def test_a_dead_worker_is_told_with_its_status(started):
    process = started()
    process.wait_ready(60)
    with pytest.raises(PeerError, match="ended with status 7"):
        process.run(workload(max_tokens=99), 60)
    assert not process.alive
    with pytest.raises(PeerError, match="ended with status 7"):
        process.run(workload(), 60)


def test_a_worker_that_does_not_answer_is_ended(tmp_path):
    process = Process([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ), tmp_path / "log")
    with pytest.raises(PeerError, match="no answer in 0 s"):
        process.wait_ready(0.2)
    assert not process.alive


def test_failures_of_a_load_and_of_a_side_are_kept_apart(started):
    side = ("fake", "plain")
    process = started()
    process.wait_ready(60)
    sides = Sides(Results([side], [1, 8]), {side: process})
    list(vs_peers.measure(sides, workload(), 2, [1, 8], 3, lambda stage, done, total: None))
    assert len(sides.results.turns[side][1]) == 3
    assert sides.results.failures[side] == {8: "ValueError: only one at a time"}
    assert sides.turn(side, workload(max_tokens=99)) is None
    assert sides.results.failure(side, 1).startswith("ended with status 7")


def test_a_load_has_prompts_for_all_that_run_at_once(monkeypatch):
    asked = []
    monkeypatch.setattr(Sides, "turn", lambda self, side, at_load: asked.append(at_load["prompts"]))
    monkeypatch.setattr(vs_peers, "_warm_up", lambda *_: None)
    prompts = [[number] for number in range(9)]
    sides = Sides(Results([("fake", "plain")], [1, 8]), {("fake", "plain"): None})
    list(vs_peers.measure(sides, {**workload(), "prompts": prompts}, 3, [1, 8], 1, lambda stage, done, total: None))
    assert asked == [[[0], [3], [6]], prompts[:8]]


def test_figures_are_kept_after_every_round(started, tmp_path):
    process = started()
    process.wait_ready(60)
    sides = Sides(Results([(OURS, PLAIN)], [1]), {(OURS, PLAIN): process})
    seen = []
    for _ in vs_peers.measure(sides, workload(), 2, [1], 2, lambda stage, done, total: None):
        vs_peers.keep(argparse.Namespace(output_dir=tmp_path), sides)
        [side] = json.loads((tmp_path / "vs_peers.json").read_text())["sides"]
        seen.append(len(side["loads"]["1"]["rounds"]))
    assert seen == [1, 2]
    assert side["agreement"] == {"same": 2, "start": 2, "prompts": 2}


def test_so_many_requests_run_at_once_until_none_is_left():
    running, seen = {}, []

    def step():
        seen.append(len(running))
        done = [number for number, left in running.items() if left == 1]
        for number in list(running):
            running[number] -= 1
        for number in done:
            del running[number]
        return done

    keep_running(5, 2, lambda number: running.__setitem__(number, number + 1), step)
    assert not running
    assert max(seen) == 2
    assert sum(seen) == 1 + 2 + 3 + 4 + 5


def test_ends():
    one = workload(max_tokens=3)
    assert not ended([5, 6], one)
    assert ended([5, 6, 7], one)
    assert ended([5, 0], one)
    assert without_end([5, 0, 6], [0]) == [5]
    assert produced([[5], [5, 6, 7]], 3) == 2 + 3


def test_rates():
    turn = Turn(prompts=2, prompt_tokens=100, tokens=22, prefill_s=0.5, total_s=2.5)
    assert (turn.prefill, turn.decoding, turn.total) == (200, 10, 8.8)
    assert Turn(2, 100, 22, 0.5, 0.4).decoding == float("inf")


def test_agreement_counts_answers_and_their_starts():
    long = list(range(20))
    assert agreement([long, [*long[:15], 9], [1]], [long, long, long]) == Agreement(same=1, same_start=2, prompts=3)


def measured():
    slow, fast, gone, ours = ("them", "slow"), ("them", "fast"), ("gone", "plain"), (OURS, PLAIN)
    results = Results([ours, slow, fast, gone], [1, 8])
    for side, seconds in ((ours, 1.0), (slow, 4.0), (fast, 2.0)):
        for load in (1, 8):
            results.add(side, load, Turn(1, 100, 101, 0.5, 0.5 + seconds))
    results.fail(gone, None, "does not install: no compiler")
    results.fail(fast, 8, "one at a time")
    results.agreement = {ours: Agreement(4, 4, 4), slow: Agreement(0, 1, 4)}
    return results


def shown(table):
    console = Console(file=StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


def test_the_best_of_a_peer_is_chosen_by_load():
    results = measured()
    assert results.best("them", 1) == ("them", "fast")
    assert results.best("them", 8) == ("them", "slow")
    assert results.best("gone", 1) is None
    lines = shown(report.best_table(results, OURS)).splitlines()
    them = next(line for line in lines if "them" in line)
    assert "40 (fast), 1.67×" in them
    assert "22 (slow), 3.00×" in them
    assert any("gone" in line and line.count("failed") == 2 for line in lines)


def test_who_failed_is_named_with_the_reason():
    results = measured()
    assert report.failures(results) == [
        "them, fast, 8 at once: one at a time",
        "gone, plain: does not install: no compiler",
    ]
    text = shown(report.full_table(results))
    assert "200 / 100 / 67" in text
    assert "0 / 1 of 4 ?" in text
    assert next(line for line in text.splitlines() if "gone" in line).count("failed") == 2


def test_the_document_and_the_picture(tmp_path):
    results = measured()
    document = json.loads(json.dumps(results.as_document()))
    assert document["sides"][3]["failures"] == {"all": "does not install: no compiler"}
    assert document["sides"][2]["loads"]["8"]["total"] is None
    assert document["sides"][0]["loads"]["1"]["decoding"] == 100
    report.picture(results, tmp_path / "bars.png", "bars")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_those_far_behind_sit_out_and_our_plain_decoding_does_not():
    results = Results([(OURS, PLAIN), (OURS, "int8"), ("them", "slow"), ("them", "fast")], [1])
    for side, seconds in zip(results.order, (4.0, 1.0, 4.0, 1.0), strict=True):
        for _ in range(2):
            results.add(side, 1, Turn(1, 100, 101, 0.5, seconds))
    sides = Sides(results, dict.fromkeys(results.order))
    assert vs_peers.contenders(sides, 1) == [(OURS, PLAIN), (OURS, "int8"), ("them", "fast")]


def test_an_environment_is_made_once(tmp_path):
    recipe = Recipe(("first",), alone="engine==1", without=("torch",))
    commands = []

    def run(command):
        commands.append(command[1:])
        (tmp_path / "engine").mkdir(exist_ok=True)
        return "torch==2\nsecond>=3 ; python_version > '3'\nthird ; extra == 'x'\n"

    for _ in range(2):
        make(tmp_path / "engine", recipe, run)
    assert len(commands) == 5
    assert commands[2][-2:] == ["--no-deps", "engine==1"]
    assert commands[4][-1:] == ["second>=3 ; python_version > '3'"]
    assert is_ready(tmp_path / "engine", recipe)
    assert not is_ready(tmp_path / "engine", Recipe(("another",)))


def test_variables_are_set_while_packages_are_built(tmp_path):
    recipe = Recipe(("engine",), variables=("CFLAGS=-O1",))
    commands = []

    def run(command):
        commands.append(command)
        (tmp_path / "engine").mkdir(exist_ok=True)
        return ""

    make(tmp_path / "engine", recipe, run)
    assert commands[1][:2] == ["env", "CFLAGS=-O1"]
    assert "--no-cache-dir" in commands[1]
    assert not is_ready(tmp_path / "engine", Recipe(("engine",)))


def test_what_does_not_install_is_told(tmp_path):
    run = logged(tmp_path / "log")
    with pytest.raises(SetUpError, match="ERROR: no such package"):
        run([sys.executable, "-c", "print('ERROR: no such package'); print('bye'); raise SystemExit(1)"])
    assert "no such package" in (tmp_path / "log").read_text()


def test_a_peer_that_does_not_install_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    def fail(folder, recipe):
        if folder.name == "llama_cpp":
            raise SetUpError("no compiler")

    monkeypatch.setattr(vs_peers.environments, "make", fail)
    peers = [PEERS["llama_cpp"], PEERS["transformers"], PEERS["dynaspec"]]
    results = Results([(peer.name, variant) for peer in peers for variant in peer.variants], [1])
    pythons = vs_peers.set_up(peers, tmp_path, results, lambda stage, done, total: None)
    assert pythons == {"Transformers": interpreter(tmp_path / "transformers"), OURS: Path(sys.executable)}
    assert {side[0] for side in results.failures} == {"llama.cpp"}
    assert results.failure(("llama.cpp", "Q8_0"), 1) == "does not install: no compiler"


def test_requirements():
    assert package_name("torchcodec>=0.14; platform_machine") == "torchcodec"
    assert kept(["torch==2", "a[b]>1", "c; extra == 'd'"], ("torch",)) == ["a[b]>1"]


def test_the_environment_of_workers(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "src")
    python = tmp_path / "bin" / "python"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    theirs, ours = (vs_peers.variables(PEERS[name], python, 2) for name in ("vllm_cpu", "dynaspec"))
    assert "PYTHONPATH" not in theirs
    assert theirs["LD_PRELOAD"].endswith("libiomp5.so")
    assert theirs["OMP_NUM_THREADS"] == "2"
    assert ours["PYTHONPATH"] == "src"


def test_every_peer_has_a_worker_and_the_head_is_filled_in():
    for name, peer in PEERS.items():
        assert WORKER.with_name(f"{peer.worker}.py").is_file()
        assert peer.worker == name
    options = vs_peers.with_head(vs_peers.DYNASPEC.variants["auto, EAGLE-3"])
    assert (Path(options["speculative_config"]["model"]) / "config.json").is_file()
    assert vs_peers.with_head({"dtype": "bfloat16"}) == {"dtype": "bfloat16"}


def test_only_the_variants_asked_for_run():
    chosen = vs_peers.chosen_peers(["dynaspec", "llama_cpp", "openvino"], ["int8", PLAIN])
    assert [(peer.name, list(peer.variants)) for peer in chosen] == [
        (OURS, [PLAIN, "int8"]),
        ("OpenVINO GenAI", ["int8"]),
    ]
    assert vs_peers.chosen_peers(list(PEERS), None) == list(PEERS.values())


def test_a_variant_that_no_chosen_peer_has_is_named():
    with pytest.raises(ConfigError, match=r"^variants: got Q8_0; expected some of .*int8"):
        vs_peers.chosen_peers(["dynaspec"], ["int8", "Q8_0"])
