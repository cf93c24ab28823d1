"""What was measured on vLLM, as a table, as JSON, and in words."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..provenance import provenance
from .vllm import OURS, PLAIN, SCHEDULED, WANTED, WANTED_SHIFT, Result
from .vllm_workloads import SHIFT


def as_table(result: Result) -> Table:
    """One workload a line: tokens/s of every side, and dynaspec's speed over the best of the others."""
    first = next(iter(result.rates.values()))
    fixed = [side for side in first if side not in (OURS, SCHEDULED, PLAIN)]
    table = Table(box=SIMPLE_HEAD, title="vLLM: tokens/s; by itself, and with dynaspec", title_justify="left")
    for name in ("requests at once", PLAIN, *fixed, SCHEDULED, OURS, "best rival", "dynaspec over it", "over plain"):
        table.add_column(name, justify="right", no_wrap=True)
    for workload, rates in result.rates.items():
        best = result.best_rival(workload)
        cells = [f"{median(rates[side]):.1f}" for side in (PLAIN, *fixed, SCHEDULED, OURS)]
        table.add_row(workload, *cells, best, *(_ratio(result, workload, side) for side in (best, PLAIN)))
    return table


def verdict(result: Result) -> str:
    """What was to be reached, and whether it was."""
    missed = [
        f"{workload} ({result.ratio(workload, result.best_rival(workload))[0]:.3f})"
        for workload in result.rates
        if result.ratio(workload, result.best_rival(workload))[0] < _wanted(workload)
    ]
    wanted = f"wanted: {WANTED} of the best at every load, more than the best fixed length over what changes ({SHIFT})"
    scheduled = ", ".join(
        f"{result.ratio(workload, result.best_rival(workload), SCHEDULED)[0]:.3f} ({workload})"
        for workload in result.rates
    )
    return (
        f"{wanted}: {'reached' if not missed else 'missed at ' + ', '.join(missed)}\n"
        f"dynaspec's scheduler over vLLM's own drafter ({SCHEDULED}), over the best: {scheduled}"
    )


def as_document(result: Result, options: dict[str, Any]) -> dict[str, Any]:
    """All rounds, for programs."""
    found = {
        workload: {
            "best_rival": (best := result.best_rival(workload)),
            "ratio": dict(zip(("median", "lower_bound"), result.ratio(workload, best), strict=True)),
            "tokens_per_s": {side: list(values) for side, values in rates.items()},
        }
        for workload, rates in result.rates.items()
    }
    return {"provenance": provenance(), "vllm": result.version, "options": options, "workloads": found}


def _wanted(workload: str) -> float:
    return WANTED_SHIFT if workload == SHIFT else WANTED


def _ratio(result: Result, workload: str, side: str) -> str:
    middle, bound = result.ratio(workload, side)
    return f"{middle:.3f} (≥ {bound:.3f})"
