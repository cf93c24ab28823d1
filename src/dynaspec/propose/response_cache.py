"""Answers of earlier requests, for suffix decoding: one suffix tree for each cache salt, bounded in all together."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .suffix_tree import Branching, SuffixDraft, SuffixTree


@dataclass(slots=True)
class _Tenant:
    """What requests of one cache salt share."""

    tree: SuffixTree
    free: list[int] = field(default_factory=list)
    """Names of sequences that have been evicted."""
    used: int = 0
    """Names ever given out."""


class ResponseCache:
    """The latest answers, those that still grow too. The oldest one leaves first, whosever it is.

    Requests with different salts never see each other's tokens, not even by how long drafts are.

    Args:
        max_depth: see ``SuffixTree``.
        max_responses: answers kept at most; 0 = none.
        max_tokens: of all of them together, at most.
    """

    def __init__(self, max_depth: int, max_responses: int, max_tokens: int) -> None:
        self._max_depth, self._max_responses, self._max_tokens = max_depth, max_responses, max_tokens
        self._tenants: dict[str, _Tenant] = {}
        self._order: OrderedDict[int, tuple[str, int]] = OrderedDict()
        """Key of an answer → cache salt and name in its tree, the oldest first."""
        self._next = 0
        self.tokens = 0
        """Of all answers."""

    def __len__(self) -> int:
        return len(self._order)

    @property
    def bytes(self) -> int:
        """Memory of the trees."""
        return sum(tenant.tree.bytes for tenant in self._tenants.values())

    def start(self, cache_salt: str) -> int | None:
        """Begins an answer, for which the oldest one may leave.

        Returns:
            Its key; None if none are kept.
        """
        if not self._max_responses:
            return None
        while len(self._order) >= self._max_responses:
            self._evict()
        tenant = self._tenants.get(cache_salt)
        if tenant is None:
            tenant = self._tenants[cache_salt] = _Tenant(SuffixTree(self._max_depth))
        if tenant.free:
            name = tenant.free.pop()
        else:
            name, tenant.used = tenant.used, tenant.used + 1
        tenant.tree.start(name)
        key, self._next = self._next, self._next + 1
        self._order[key] = cache_salt, name
        return key

    def append(self, key: int | None, tokens: npt.NDArray[np.integer]) -> None:
        """An answer has grown by these tokens [n]. Nothing happens if it has left, or was never kept."""
        if key is None or key not in self._order:
            return
        cache_salt, name = self._order[key]
        self._tenants[cache_salt].tree.append(name, tokens)
        self.tokens += tokens.size
        while self.tokens > self._max_tokens:
            self._evict()

    def speculate(
        self,
        cache_salt: str,
        context: npt.NDArray[np.int32],
        length: int,
        max_tokens: int,
        max_factor: float,
        min_probability: float,
        branching: Branching | None = None,
    ) -> SuffixDraft | None:
        """What answers of this salt go on with; see ``SuffixTree.speculate``. None if there are none."""
        tenant = self._tenants.get(cache_salt)
        if tenant is None:
            return None
        return tenant.tree.speculate(context, length, max_tokens, max_factor, 0.0, min_probability, branching)

    def _evict(self) -> None:
        _, (cache_salt, name) = self._order.popitem(last=False)
        tenant = self._tenants[cache_salt]
        before = tenant.tree.tokens
        tenant.tree.evict(name)
        self.tokens -= before - tenant.tree.tokens
        tenant.free.append(name)
        if not tenant.tree.sequences:
            del self._tenants[cache_salt]
