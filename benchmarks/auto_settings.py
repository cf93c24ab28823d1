"""How little each setting of ``auto`` matters: halves and doubles every one and runs the closed loop.

Prints a table: for each setting the lowest and the highest change of any result. With --write the table goes into
docs/auto.md. Takes an hour on one core; --quick runs one seed of each scenario and one load.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.progress import track

from dynaspec.control.auto import AutoSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import auto_scenarios as scenarios  # from the tests

DOC = Path(__file__).parents[1] / "docs" / "auto.md"
BEGIN, END = "<!-- settings-table -->", "<!-- /settings-table -->"


def with_setting(name: str, factor: float) -> AutoSettings:
    """The defaults, but one setting times a factor; integers stay integers of at least 1, chances below 1."""
    old = getattr(AutoSettings(), name)
    new = max(1, round(old * factor)) if isinstance(old, int) else old * factor
    if name == "prior":  # a chance: on the scale of odds
        odds = old / (1.0 - old) * factor
        new = odds / (1.0 + odds)
    return replace(AutoSettings(), **{name: new})


def results(settings: AutoSettings, seeds: range) -> dict[str, float]:
    """Speeds of the closed loop, higher is better."""
    make = partial(scenarios.auto, settings=settings)
    found = {
        "adversary": 1.0 - scenarios.adversary_cost(make, 0, tuple(seeds)),
        "adversary, 4,000 tokens": 1.0 - scenarios.adversary_cost(make, 4000, tuple(seeds)),
        "drifting, plain faster": scenarios.drifting(make, scenarios.DEAR, 1.0, tuple(seeds)),
        "drifting, drafts faster": scenarios.drifting(make, scenarios.CHEAP, 1.0, tuple(seeds)),
        "alternating": float(np.mean([scenarios.alternating(make, seed) for seed in seeds])),
    }
    for host, (limits, whole) in scenarios.HOSTS.items():
        ratios = [
            scenarios.on_hardware(make, machine, limits, whole, requests, 1.0, seed)[0]
            for machine in scenarios.MACHINES.values()
            for requests in ((1, 8, 64) if len(seeds) > 1 else (8,))
            for seed in seeds
        ]
        found[f"hardware, {host}"] = float(np.mean(ratios))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed of each scenario, one load")
    parser.add_argument("--seeds", type=int, default=4, help="of each scenario, over three loads")
    parser.add_argument("--write", action="store_true", help="put the table into docs/auto.md")
    args = parser.parse_args()
    seeds = range(1, 2 if args.quick else 1 + max(2, args.seeds))
    usual = results(AutoSettings(), seeds)
    lines = ["| setting | value | halved: lowest … highest change of a result, % | doubled |", "|---|---|---|---|"]
    for name in track([field.name for field in fields(AutoSettings)], description="settings"):
        cells, value = [], getattr(AutoSettings(), name)
        for factor in (0.5, 2.0):
            changes = {key: new / usual[key] - 1.0 for key, new in results(with_setting(name, factor), seeds).items()}
            worst = min(changes, key=changes.__getitem__)
            best = max(changes, key=changes.__getitem__)
            cells.append(f"{100 * changes[worst]:+.1f} ({worst}) … {100 * changes[best]:+.1f} ({best})")
        lines.append(f"| `{name}` | {value:g} | {cells[0]} | {cells[1]} |")
    table = "\n".join(lines)
    print(table)
    if args.write:
        text = DOC.read_text(encoding="utf-8")
        begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        DOC.write_text(text[:begin] + "\n" + table + "\n" + text[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
