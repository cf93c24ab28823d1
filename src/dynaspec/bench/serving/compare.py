"""Results of load tests and of ``bench offline`` side by side, as ratios to the first."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dynaspec.contract.errors import ConfigError

from .server import METRICS

Json = Mapping[str, Any]

HIGHER, LOWER, NEITHER = 1, -1, 0
"""Which way is better."""
_FIGURES: Mapping[str, int] = {
    "completed": NEITHER,
    "failed": LOWER,
    "duration": NEITHER,
    "total_input_tokens": NEITHER,
    "total_output_tokens": NEITHER,
    "request_throughput": HIGHER,
    "request_goodput": HIGHER,
    "output_throughput": HIGHER,
    "total_token_throughput": HIGHER,
    "max_output_tokens_per_s": HIGHER,
    "max_concurrent_requests": NEITHER,
    "spec_decode_acceptance_rate": HIGHER,
    "spec_decode_acceptance_length": HIGHER,
    "client_cpu_share": NEITHER,
}
_TIME = re.compile(rf"(mean|median|p[\d.]+)_({'|'.join(METRICS)})_ms")
_OFFLINE: Mapping[str, int] = {
    "tokens_per_second": HIGHER,
    "speedup": HIGHER,
    "output_tokens": NEITHER,
    "different_outputs": LOWER,
    "mean_acceptance_length": HIGHER,
    "draft_acceptance_rate": HIGHER,
    "target_passes": LOWER,
    "drafter_passes": NEITHER,
}
_SETUP = ("backend", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency")
_MACHINE = ("cpu", "cpu_count", "gpus")
_NOTHING = "not said"
_VARIES = {"url", "root", "policies"}
"""Settings that are what is compared, or where it stood."""
MARGIN = 0.01
"""Ratios within this of 1 are called neither better nor worse."""
_STYLES = {1: ("green", "better"), -1: ("red", "worse"), 0: ("", "")}


@dataclass(frozen=True, slots=True)
class Result:
    """What one file, or one policy in it, says."""

    name: str
    figures: Mapping[str, float]
    settings: Mapping[str, Any]
    is_silent: bool = False
    """It does not say all of its settings."""


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure in all results; None where one lacks it."""

    name: str
    better: int
    values: tuple[float | None, ...]

    def ratio(self, i: int) -> float | None:
        """Of result ``i`` to the first."""
        first, value = self.values[0], self.values[i]
        return value / first if first and value is not None else None

    def verdict(self, i: int, margin: float) -> int:
        """1: result ``i`` is better than the first by more than the margin; −1: worse; 0: neither."""
        first, value = self.values[0], self.values[i]
        if self.better == NEITHER or first is None or value is None or abs(value - first) <= margin * abs(first):
            return 0
        return self.better if value > first else -self.better


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results, their figures, and the settings in which they differ."""

    names: tuple[str, ...]
    lines: tuple[ComparedFigure, ...]
    differing: Mapping[str, tuple[str, ...]]
    """Setting → what each result says of it; at least two that say something differ."""
    silent: tuple[str, ...]
    """Results that say little of their settings, as other programs' do."""


def compare(results: Sequence[Result]) -> Comparison:
    """
    Raises:
        ConfigError: fewer than two results, or none of their figures in common.
    """
    if len(results) < 2:
        raise ConfigError(f"{len(results)} result was given; expected at least two to compare")
    known = list(dict.fromkeys(name for result in results for name in result.figures))
    lines = tuple(
        ComparedFigure(name, _better(name), tuple(result.figures.get(name) for result in results)) for name in known
    )
    if not any(None not in line.values for line in lines):
        raise ConfigError("the results have no figure in common; expected files of one kind")
    settings = dict.fromkeys(name for result in results for name in result.settings)
    said = {name: tuple(_said(result.settings, name) for result in results) for name in settings}
    return Comparison(
        names=tuple(result.name for result in results),
        lines=lines,
        differing={name: several for name, several in said.items() if len(set(several) - {_NOTHING}) > 1},
        silent=tuple(result.name for result in results if result.is_silent),
    )


def load_results(paths: Sequence[Path]) -> list[Result]:
    """The results in the files: of one written by ``bench offline``, every policy is a result.

    Raises:
        ConfigError: a file that cannot be read, or is no such result.
    """
    names = _short_names(paths)
    return [result for path, name in zip(paths, names, strict=True) for result in _load(path, name)]


def _load(path: Path, name: str) -> list[Result]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the result {path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON ({error.msg}); expected a result of bench serve") from None
    if isinstance(document, Mapping) and "request_throughput" in document:
        return [_of_serve(document, name)]
    if isinstance(document, Mapping) and isinstance(document.get("results"), list):
        return [_of_policy(document, entry, name) for entry in document["results"]]
    raise ConfigError(f"{path} is no result of bench serve or bench offline; expected one")


def _of_serve(document: Json, name: str) -> Result:
    figures = {key: document[key] for key in _FIGURES if _is_number(document.get(key))}
    times = {
        key: value
        for key, value in document.items()
        if _TIME.fullmatch(key) and not key.startswith("p50_") and _is_number(value)
    }
    setup = {key: document[key] for key in _SETUP if key in document}
    server = {f"server.{key}": value for key, value in document.get("server", {}).items() if key not in _VARIES}
    settings = setup | dict(document.get("settings", {})) | server | _machine(document)
    return Result(name, figures | times, settings, is_silent="settings" not in document)


def _of_policy(document: Json, entry: Json, name: str) -> Result:
    values = {**entry.get("counts", {}), **entry}
    figures = {key: values[key] for key in _OFFLINE if _is_number(values.get(key))}
    options = {key: value for key, value in document.get("options", {}).items() if key not in _VARIES}
    return Result(f"{name} {entry.get('policy')}", figures, options | _machine(document))


def _machine(document: Json) -> dict[str, Any]:
    machine = document.get("provenance", {}).get("machine", {})
    return {f"machine.{key}": machine[key] for key in _MACHINE if key in machine}


def _better(name: str) -> int:
    known = _FIGURES.get(name, _OFFLINE.get(name))
    return LOWER if known is None else known


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Names of the files; with their folders where names are alike."""
    stems = [path.stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in paths]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _said(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name], sort_keys=True, ensure_ascii=False) if name in settings else _NOTHING


def as_table(comparison: Comparison) -> Table:
    """A figure a line; each result's value, and for all but the first its ratio to the first."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("figure", no_wrap=True)
    for i, name in enumerate(comparison.names):
        table.add_column(Text(name), justify="right", overflow="fold")
        if i:
            table.add_column("/ first", justify="right", no_wrap=True)
            table.add_column("", no_wrap=True)
    for line in comparison.lines:
        table.add_row(line.name, *_cells(line))
    return table


def warnings(comparison: Comparison) -> list[str]:
    """A sentence for every setting in which the results differ, and for those who do not say theirs."""
    differing = [f"{name} differs: {', '.join(said)}" for name, said in comparison.differing.items()]
    return differing + [f"{name} does not say all of its settings" for name in comparison.silent]


def _cells(line: ComparedFigure) -> list[Text]:
    cells = [Text(_number(line.values[0]))]
    for i in range(1, len(line.values)):
        style, word = _STYLES[line.verdict(i, MARGIN)]
        ratio = line.ratio(i)
        shown = "-" if ratio is None else f"{ratio:.3f}"
        cells += [Text(_number(line.values[i])), Text(shown, style=style), Text(word, style=style)]
    return cells


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"
