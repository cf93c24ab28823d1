"""A recommendation as a table, in words, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

import dynaspec
from dynaspec.simulate.policies import PLAIN

from .comparison import AUTO, FIXED, SCHEDULE, Predicted, Progress, predict
from .evidence import Evidence
from .settings import Names, Paste, check_backend, pastes, speculative_config
from .verdict import Verdict, decide

SCHEMA = 1
"""Of the JSON document; grows when a key changes its meaning."""
_ADVICE = {
    "auto": "Configure policy auto.",
    "fixed": "Configure the fixed draft length {length}.",
    "schedule": "Configure a draft length by batch size (policy schedule).",
    "plain": "Do not speculate.",
}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """All that is said."""

    evidence: Evidence
    predicted: Predicted
    verdict: Verdict
    backend: str
    names: Names
    settings: tuple[Paste, ...]

    @property
    def advice(self) -> str:
        """The recommendation in one sentence."""
        return _ADVICE[self.verdict.choice].format(length=self.verdict.length)

    @property
    def notes(self) -> list[str]:
        """What these figures do not cover."""
        lines = []
        largest = max(self.predicted.loads)
        if largest > self.evidence.most:
            lines.append(f"nothing was measured beyond {self.evidence.most} requests at once")
        if self.evidence.limits is None:
            lines.append("a profile knows no confidences, by which auto does better where the drafter tells them")
        elif self.evidence.profile_path is None:
            lines.append("step times are fitted to the log, and lengths that it never has are extrapolated")
        return lines

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        predicted, evidence = self.predicted, self.evidence
        return {
            "schema": SCHEMA,
            "kind": "recommendation",
            "dynaspec": dynaspec.__version__,
            "sources": list(evidence.sources),
            "backend": self.backend,
            "recommendation": self.verdict.choice,
            "advice": self.advice,
            "num_speculative_tokens": self.verdict.length,
            "reasons": list(self.verdict.reasons),
            "notes": self.notes,
            "speculative_config": speculative_config(self.verdict, self.names, evidence.longest, predicted.ranges),
            "settings": [asdict(paste) for paste in self.settings],
            "loads": [
                {
                    "requests": load,
                    "best_fixed": predicted.best_fixed(at),
                    "tokens_per_second": {name: found[at] for name, found in predicted.speeds.items()},
                }
                for at, load in enumerate(predicted.loads)
            ],
            "num_speculative_tokens_per_batch_size": [list(entry) for entry in predicted.ranges],
        }


def recommend(
    evidence: Evidence, loads: Sequence[int], backend: str | None, names: Names, progress: Progress
) -> Recommendation:
    """
    Args:
        loads: requests at once, ascending.
        backend: what settings are for; None = where the logs come from.

    Raises:
        ConfigError: an unknown backend.
    """
    chosen = backend or evidence.backend
    check_backend(chosen)
    predicted = predict(evidence, loads, progress)
    verdict = decide(predicted)
    settings = tuple(pastes(chosen, verdict, names, evidence.longest, predicted.ranges))
    return Recommendation(evidence, predicted, verdict, chosen, names, settings)


def as_table(predicted: Predicted) -> Table:
    """One load a line: predicted tokens/s."""
    table = Table(box=SIMPLE_HEAD, title="Predicted tokens/s", title_justify="left")
    for name in ("requests at once", "plain", "best fixed", "schedule", "auto", "auto over plain"):
        table.add_column(name, justify="right", no_wrap=True)
    for at, load in enumerate(predicted.loads):
        best = predicted.best_fixed(at)
        shown = {
            "plain": (PLAIN, ""),
            "fixed": (f"{FIXED}{best}", f" (k = {best})"),
            "schedule": (SCHEDULE, ""),
            "auto": (AUTO, ""),
        }
        fastest = max(predicted.speeds[policy][at] for policy, _ in shown.values())
        cells = [
            Text(f"{speed:.0f}{more}", style="bold green" if speed == fastest else "")
            for speed, more in ((predicted.speeds[policy][at], more) for policy, more in shown.values())
        ]
        ratio = predicted.speeds[AUTO][at] / predicted.speeds[PLAIN][at]
        table.add_row(str(load), *cells, f"{ratio:.2f}×")
    return table
