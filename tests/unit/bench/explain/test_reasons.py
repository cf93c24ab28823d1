from __future__ import annotations

import numpy as np

from dynaspec.bench.explain import reasons as why
from dynaspec.bench.explain.data import LogData, Rows, load
from dynaspec.bench.explain.reasons import reasons

from .logs import Fixed, Host


def counted(path, columns: dict[str, list[int]]) -> dict[str, int]:
    """The reasons for rows with these columns; all others are drafted for and verified."""
    data = load(path)
    size = data.rows.step.size
    rows = {name: np.array((values + [None] * size)[:size]) for name, values in columns.items()}
    changed = {
        name: np.array([getattr(data.rows, name)[i] if v is None else v for i, v in enumerate(values)])
        for name, values in rows.items()
    }
    fields = {name: changed.get(name, getattr(data.rows, name)) for name in Rows.__dataclass_fields__}
    return dict(
        reasons(LogData(**{f: getattr(data, f) for f in LogData.__dataclass_fields__} | {"rows": Rows(**fields)}))
    )


def test_each_reason(tmp_path):
    path = Host(tmp_path / "log", ids=tuple("abcdefgh")).run(Fixed(2, believed={"reason": "too slow"}), 1)
    found = counted(
        path,
        {
            "verified": [0, 0, 0, 0, 0, 0, 0],
            "drafted": [2, 0, 0, 0, 0, 0, 0],
            "granted": [2, 2, 0, 0, 0, 0, 0],
            "planned": [2, 2, 0, 0, 2, 0, -1],
            "wish": [-1, -1, 0, -1, -1, -1, -1],
            "room": [9, 9, 9, 0, 9, 9, 9],
        },
    )
    assert found == {
        why.TRIMMED: 1,
        why.NOTHING: 1,
        why.REQUESTED_OFF: 1,
        why.NO_ROOM: 1,
        why.HOST: 1,
        f"{why.POLICY}: too slow": 1,
        "not known": 1,
        why.DRAFTED: 1,
    }


def test_plain_decoding_by_choice(tmp_path):
    data = load(Host(tmp_path / "log").run(Fixed(0), 7))
    assert reasons(data) == {why.POLICY: 14}
