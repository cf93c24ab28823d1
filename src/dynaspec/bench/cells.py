"""What has been measured for a profile, kept line by line in a file: an interrupted run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynaspec.contract.errors import ConfigError


class Cells:
    """Measurements by batch size and draft length. The file's first line says what they were made with."""

    def __init__(self, path: Path, made_with: Mapping[str, Any]) -> None:
        """Reads what there is; begins anew if it was made with something else. A torn last line is dropped.

        Raises:
            ConfigError: the file cannot be read or written.
        """
        self._path = path
        self._steps: dict[tuple[int, int, int], list[float]] = {}
        self._acceptance: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.stale = False
        """There were measurements, but made with something else."""
        header = {"made_with": json.loads(json.dumps(made_with))}
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            if lines and _parsed(lines[0]) == header:
                whole = [line for line in lines if line.endswith("\n")]
                if len(whole) < len(lines):
                    path.write_text("".join(whole), encoding="utf-8")
                for line in whole[1:]:
                    self._read(_parsed(line))
            else:
                self.stale = bool(lines)
                path.write_text(json.dumps(header) + "\n", encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the measurements in {path} cannot be kept: {error}") from None

    def __len__(self) -> int:
        return len(self._steps) + len(self._acceptance)

    def step_ms(self, turn: int, batch: int, k: int) -> list[float] | None:
        """Milliseconds of the steps of one batch; None if it has not been measured."""
        return self._steps.get((turn, batch, k))

    def all_step_ms(self, batch: int, k: int, turns: int) -> list[float]:
        """Of the first ``turns`` batches of this size together."""
        return [ms for turn in range(turns) for ms in self._steps[turn, batch, k]]

    def acceptance(self, longest: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """(drafted, accepted) by position, of drafts of this length; None if not counted."""
        return self._acceptance.get(longest)

    def add_step_ms(self, turn: int, batch: int, k: int, times: Sequence[float]) -> None:
        self._add({"turn": turn, "batch": batch, "k": k, "ms": [round(ms, 4) for ms in times]})

    def add_acceptance(self, longest: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self._add({"longest": longest, "drafted": list(drafted), "accepted": list(accepted)})

    def _add(self, record: dict[str, Any]) -> None:
        self._read(record)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise ConfigError(f"the measurements in {self._path} cannot be kept: {error}") from None

    def _read(self, record: Any) -> None:
        if isinstance(record, dict) and "ms" in record:
            self._steps[record["turn"], record["batch"], record["k"]] = record["ms"]
        elif isinstance(record, dict) and "accepted" in record:
            self._acceptance[record["longest"]] = (tuple(record["drafted"]), tuple(record["accepted"]))


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
