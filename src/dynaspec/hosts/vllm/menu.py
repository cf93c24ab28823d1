"""The draft lengths that vLLM can run.

On a GPU vLLM captures CUDA graphs for those draft lengths that ``num_speculative_tokens_per_batch_size`` names, its own
table of batch sizes; steps of other lengths run without. Here the table serves as the list of lengths alone: which of
them a step has is for the controller to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dynaspec.contract.errors import ConfigError

_EVERY_UP_TO = 8
_LONGER = (10, 12, 16, 20, 24, 32, 48, 64)
"""Beyond 8 a length more or less matters little, while each costs graphs and their memory."""

Table = list[tuple[int, int, int]]
"""vLLM's ``num_speculative_tokens_per_batch_size``: (first batch size, last one, draft length)."""


def k_menu(longest: int) -> tuple[int, ...]:
    """Draft lengths from 0 to ``longest`` that are worth graphs of their own, ascending, ``longest`` among them."""
    if longest < 0:
        raise ConfigError(f"the longest draft is {longest}; expected no less than 0")
    dense = range(min(longest, _EVERY_UP_TO) + 1)
    return tuple(sorted({*dense, *(k for k in _LONGER if k < longest), longest}))


def table_of(menu: Sequence[int], max_num_seqs: int) -> Table:
    """A table that names every length of ``menu`` within ``max_num_seqs`` batch sizes.

    Where there are fewer batch sizes than lengths, the longest lengths and 0 are kept.
    """
    if max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs is {max_num_seqs}; expected at least 1")
    kept = sorted(menu, reverse=True)
    if len(kept) > max_num_seqs:
        kept = [*kept[: max_num_seqs - 1], *kept[-1:]]
    return [(size, size, k) for size, k in enumerate(kept, 1)]


def menu_of(table: Iterable[Sequence[int]] | None, longest: int) -> tuple[int, ...]:
    """The lengths that ``table`` names, ascending, with 0 and ``longest``; without a table every length up to that."""
    if not table:
        return tuple(range(longest + 1))
    return tuple(sorted({0, longest, *(min(longest, k) for _, _, k in table)}))
