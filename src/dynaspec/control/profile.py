"""The goodput profile: measured step times and acceptance, as a JSON file."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Self, TypeGuard

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.errors import ConfigError

DEFAULT_WARMUP_STEPS = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Profile:
    """What a step costs by batch size and draft length, and how much of a draft is accepted.

    The file is that of vLLM's dynamic speculative decoding (vllm-project/vllm pull request 32374): a JSON object of
    the fields below, with the integer keys of ``batch_stats`` as strings. Profiles made elsewhere load as they are;
    other keys are not used, nor are rates beyond ``max_num_speculative_tokens``.

    Raises:
        ConfigError: values that cannot be; one sentence that names the key.
    """

    batch_stats: Mapping[int, Mapping[int, float]]
    """Batch size → {k: inter-token latency of a step with drafts of k tokens, in ms}; k = 0 is plain decoding."""
    acceptance_rate_per_pos: tuple[float, ...]
    """Unconditional, so non-increasing: the share of drafts whose first j tokens were all accepted, for j = 1, 2, …"""
    max_num_speculative_tokens: int
    """Longest draft it speaks for."""
    is_online: bool = False
    """Use measured acceptance instead, once there is some."""
    warmup_steps: int = DEFAULT_WARMUP_STEPS
    """Steps with drafts until then. Optional in the file, and only written when it is not the default."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_stats", _sorted_stats(self.batch_stats))
        object.__setattr__(self, "acceptance_rate_per_pos", _rates(self.acceptance_rate_per_pos))
        _check_longest(self.max_num_speculative_tokens, self.batch_stats, self.acceptance_rate_per_pos)
        if not isinstance(self.is_online, bool):
            raise ConfigError(f"is_online is {_short(self.is_online)}; expected true or false")
        if not _is_integer(self.warmup_steps) or self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {_short(self.warmup_steps)}; expected an integer of at least 0")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a profile.

        Raises:
            ConfigError: a file that cannot be read or is no profile; names the file and the key.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the profile {str(path)!r} cannot be read ({_reason(error)}); expected a file") from None
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the profile {str(path)!r} is not JSON ({_reason(error)})") from None
        return cls.parse(document, str(path))

    @classmethod
    def parse(cls, mapping: object, where: str) -> Self:
        """Reads a profile from what ``json.loads`` gave.

        Args:
            where: its origin, a file name say; begins every error.

        Raises:
            ConfigError: see ``load``.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"{where}: the profile is {_short(mapping)}; expected an object")
        for key in ("batch_stats", "acceptance_rate_per_pos", "max_num_speculative_tokens"):
            if key not in mapping:
                raise ConfigError(f"{where}: there is no {key}; expected a goodput profile, which has one")
        unused = sorted(str(key) for key in mapping if key not in cls.__dataclass_fields__)
        if unused:
            logger.info("%s: keys that a profile has no use for: %s", where, ", ".join(unused))
        try:
            return cls(
                batch_stats=mapping["batch_stats"],
                acceptance_rate_per_pos=mapping["acceptance_rate_per_pos"],
                max_num_speculative_tokens=mapping["max_num_speculative_tokens"],
                is_online=mapping.get("is_online", False),
                warmup_steps=mapping.get("warmup_steps", DEFAULT_WARMUP_STEPS),
            )
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    def document(self) -> dict[str, Any]:
        """The JSON object; ``parse`` gives the same profile back."""
        warmup = {} if self.warmup_steps == DEFAULT_WARMUP_STEPS else {"warmup_steps": self.warmup_steps}
        return {
            "is_online": self.is_online,
            "batch_stats": {
                str(batch): {str(k): itl for k, itl in row.items()} for batch, row in self.batch_stats.items()
            },
            "max_num_speculative_tokens": self.max_num_speculative_tokens,
            "acceptance_rate_per_pos": list(self.acceptance_rate_per_pos),
            **warmup,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file whole or not at all; folders above it are made.

        Raises:
            OSError: it cannot be written.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self.document(), file, indent=1)
                file.write("\n")
            os.chmod(name, 0o644)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise

    def itl_ms(self, batch: int, k: int) -> float:
        """Step time in ms: linear between measured k and between measured batch sizes, constant beyond their ends."""
        sizes = tuple(self.batch_stats)
        at = bisect_left(sizes, batch)
        if at == len(sizes):
            return _along(self.batch_stats[sizes[-1]], k)
        upper = _along(self.batch_stats[sizes[at]], k)
        if at == 0 or sizes[at] == batch:
            return upper
        lower = _along(self.batch_stats[sizes[at - 1]], k)
        return lower + (upper - lower) * (batch - sizes[at - 1]) / (sizes[at] - sizes[at - 1])

    def pass_costs(self) -> PassCosts:
        """What it tells of passes: plain decoding of b requests is a pass of b rows."""
        return PassCosts(target=tuple((batch, self.itl_ms(batch, 0) / 1e3) for batch in self.batch_stats))

    def best_length(self, batch: int, rates: Sequence[float], cap: int, *, among: Sequence[int] | None = None) -> int:
        """The k that maximises goodput AL(k) / ITL(batch, k), with AL(k) = 1 + Σ_{j ≤ k} rate_j; the smallest on ties.

        Args:
            batch: decoding requests.
            rates: unconditional acceptance per position; k does not go beyond them.
            cap: longest k; nor does it go beyond ``max_num_speculative_tokens``.
            among: the k to choose from, ascending from 0; None = all.
        """
        longest = min(cap, self.max_num_speculative_tokens, len(rates))
        lengths = tuple(accumulate(rates[:longest], initial=1.0))
        candidates = range(longest + 1) if among is None else [k for k in among if k <= longest]
        # The first of equals is the smallest.
        return max(candidates, key=lambda k: lengths[k] / self.itl_ms(batch, k))


def _along(row: Mapping[int, float], k: int) -> float:
    """The row's value at ``k``; linear between its keys, which ascend."""
    if k in row:
        return row[k]
    keys = tuple(row)
    at = bisect_left(keys, k)
    if at in (0, len(keys)):
        return row[keys[min(at, len(keys) - 1)]]
    low, high = keys[at - 1], keys[at]
    return row[low] + (row[high] - row[low]) * (k - low) / (high - low)


def _sorted_stats(stats: object) -> dict[int, dict[int, float]]:
    """Integer keys in ascending order, all values checked."""
    batches = _by_integer("batch_stats", "a batch size", stats, least=1)
    return {batch: _sorted_row(f"batch_stats[{batch}]", batches[batch]) for batch in sorted(batches)}


def _sorted_row(name: str, row: object) -> dict[int, float]:
    times = _by_integer(name, "k", row, least=0)
    if 0 not in times:
        raise ConfigError(f"{name} has no k = 0; expected the time of plain decoding to compare with")
    return {k: _time(f"{name}[{k}]", times[k]) for k in sorted(times)}


def _by_integer(name: str, what: str, value: object, least: int) -> dict[int, Any]:
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(f"{name} is {_short(value)}; expected an object with at least one entry")
    result: dict[int, Any] = {}
    for key, entry in value.items():
        number = _integer_key(key)
        if number is None or number < least:
            raise ConfigError(f"{name} has the key {key!r}; expected {what}, an integer of at least {least}")
        if number in result:
            raise ConfigError(f"{name} has {what} {number} twice; expected it once")
        result[number] = entry
    return result


def _integer_key(key: object) -> int | None:
    if _is_integer(key):
        return key
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 9:
        return int(key)
    return None


def _time(name: str, value: object) -> float:
    if not _is_number(value) or not 0.0 < value < math.inf:
        raise ConfigError(f"{name} is {_short(value)}; expected a time in ms above 0")
    return float(value)


def _rates(rates: object) -> tuple[float, ...]:
    name = "acceptance_rate_per_pos"
    if isinstance(rates, str | bytes) or not isinstance(rates, Sequence) or not rates:
        raise ConfigError(f"{name} is {_short(rates)}; expected a list of at least one number from 0 to 1")
    for position, rate in enumerate(rates):
        if not _is_number(rate) or not 0.0 <= rate <= 1.0:
            raise ConfigError(f"{name}[{position}] is {_short(rate)}; expected a number from 0 to 1")
    for position, (rate, following) in enumerate(pairwise(rates), start=1):
        if following > rate:
            raise ConfigError(
                f"{name}[{position}] is {following!r} after {rate!r}; expected rates that do not increase, as a token "
                "is only accepted after those before it"
            )
    return tuple(map(float, rates))


def _check_longest(longest: object, stats: Mapping[int, Mapping[int, float]], rates: Sequence[float]) -> None:
    name = "max_num_speculative_tokens"
    if not _is_integer(longest) or longest < 1:
        raise ConfigError(f"{name} is {_short(longest)}; expected an integer of at least 1")
    if len(rates) < longest:
        raise ConfigError(
            f"{name} is {longest} but acceptance_rate_per_pos has {len(rates)} entries; expected one for each position"
        )
    for batch, row in stats.items():
        if max(row) < longest:
            # Times are constant beyond the last k: longer drafts would look free.
            raise ConfigError(
                f"{name} is {longest} but batch_stats[{batch}] ends at k = {max(row)}; expected times up to "
                "the longest draft"
            )


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, line {error.lineno}"
    return type(error).__name__
