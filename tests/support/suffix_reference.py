"""Suffix decoding by its definition: a dictionary of all strings; and a walk through a ``SuffixTree``'s nodes."""

from __future__ import annotations

import math
from heapq import heappop, heappush

from dynaspec.propose.suffix import SuffixTree
from dynaspec.propose.suffix_kernels import (
    AT,
    BEST,
    CHILD,
    CHILDREN,
    COUNT,
    ENTRIES,
    FIRST,
    FREE_NODE,
    LENGTH,
    LIVE,
    NEXT,
    PAGE,
    PARENT,
    PREVIOUS,
    ROWS,
    SECOND,
    SIZE,
    STAMP,
)

String = tuple[int, ...]


class SuffixReference:
    """The same calls as ``SuffixTree``, slowly."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.clear()

    def clear(self) -> None:
        self.texts: dict[int, list[int]] = {}
        self.count: dict[String, int] = {}
        self.last: dict[String, int] = {}
        """When it last occurred."""
        self.followers: dict[String, set[int]] = {}
        self.clock = 0

    def start(self, sequence: int) -> None:
        self.texts[sequence] = []

    def append(self, sequence: int, tokens: list[int]) -> None:
        text = self.texts[sequence]
        for token in tokens:
            text.append(token)
            self.clock += 1
            for n in range(1, min(self.max_depth, len(text)) + 1):
                string = tuple(text[-n:])
                self.count[string] = self.count.get(string, 0) + 1
                self.last[string] = self.clock
                self.followers.setdefault(string[:-1], set()).add(token)

    def evict(self, sequence: int) -> None:
        text = self.texts.pop(sequence)
        for end in range(1, len(text) + 1):
            for n in range(1, min(self.max_depth, end) + 1):
                string = tuple(text[end - n : end])
                self.count[string] -= 1
                if not self.count[string]:
                    del self.count[string], self.last[string]
                    self.followers[string[:-1]].remove(string[-1])

    def speculate(
        self, context: list[int], max_tokens: int, factor: float, offset: float, min_probability: float
    ) -> tuple[list[int], list[float], int, float]:
        """(tokens, probabilities, length of the match, score)."""
        context = context[-self.max_depth :]
        best: tuple[list[int], list[float], int, float] = ([], [], 0, 0.0)
        for match in range(1, len(context)):
            string = tuple(context[-match:])
            if string not in self.count:
                break
            limit = min(max_tokens, math.floor(match * factor + offset + 1e-6), self.max_depth - match)
            tokens, probabilities = self._draft(string, limit, min_probability)
            if tokens and sum(probabilities) >= best[3]:
                best = tokens, probabilities, match, sum(probabilities)
        return best

    def speculate_tree(
        self,
        context: list[int],
        max_nodes: int,
        depth: int,
        width: int,
        factor: float,
        offset: float,
        min_probability: float,
    ) -> tuple[list[int], list[int], list[float], int, float]:
        """(tokens, parents, probabilities, length of the match, score)."""
        context = context[-self.max_depth :]
        best: tuple[list[int], list[int], list[float], int, float] = ([], [], [], 0, 0.0)
        for match in range(1, len(context)):
            string = tuple(context[-match:])
            if string not in self.count:
                break
            limit = min(max_nodes, math.floor(match * factor + offset + 1e-6))
            tokens, parents, probabilities = self._grow(string, limit, depth, width, min_probability)
            score = 0.0
            for probability in probabilities:
                score += probability
            if tokens and score >= best[4]:
                best = tokens, parents, probabilities, match, score
        return best

    def _grow(
        self, root: String, limit: int, depth: int, width: int, min_probability: float
    ) -> tuple[list[int], list[int], list[float]]:
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        heap: list[tuple[float, int, String, int]] = []
        found = 0
        string, probability, parent = root, 1.0, -1
        while len(tokens) < limit:
            children = [(*string, token) for token in self.followers.get(string, ())]
            children.sort(key=lambda s: (self.count[s], self.last[s]), reverse=True)
            for child in children[:width] if len(string) < len(root) + depth else []:
                chance = probability * (self.count[child] / self.count[string])
                if chance >= min_probability:
                    found += 1
                    heappush(heap, (-chance, found, child, parent))
            if not heap:
                break
            negative, _, string, above = heappop(heap)
            probability, parent = -negative, len(tokens)
            tokens.append(string[-1])
            parents.append(above)
            probabilities.append(probability)
        return tokens, parents, probabilities

    def _draft(self, string: String, limit: int, min_probability: float) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        probabilities: list[float] = []
        probability = 1.0
        while len(tokens) < limit and self.followers.get(string):
            longer = max(
                ((*string, token) for token in self.followers[string]), key=lambda s: (self.count[s], self.last[s])
            )
            probability *= self.count[longer] / self.count[string]
            if probability < min_probability:
                break
            tokens.append(longer[-1])
            probabilities.append(probability)
            string = longer
        return tokens, probabilities


def strings_of(tree: SuffixTree) -> dict[String, int]:
    """All strings with their counts, read from the nodes; checks everything that must hold of these."""
    inner, nodes = tree._tree, tree._tree.nodes.tolist()
    counts: dict[String, int] = {}
    seen = in_table = 0
    todo: list[tuple[int, String]] = [(0, ())]
    while todo:
        node, string = todo.pop()
        seen += 1
        children: list[int] = []
        child = nodes[node][CHILD]
        while child:
            assert nodes[child][PREVIOUS] == (children[-1] if children else 0)
            children.append(child)
            child = nodes[child][NEXT]
        assert nodes[node][CHILDREN] == len(children)
        assert len({nodes[child][FIRST] for child in children}) == len(children)
        in_table += len(children) if len(children) > 1 else 0
        if node:
            assert sum(nodes[child][COUNT] for child in children) <= nodes[node][COUNT]
            assert len(children) != 1 or nodes[children[0]][COUNT] < nodes[node][COUNT]
        if best := nodes[node][BEST]:
            assert best == max(children, key=lambda child: (nodes[child][COUNT], nodes[child][STAMP]))
            assert nodes[node][SECOND] >= max((nodes[child][COUNT] for child in children if child != best), default=0)
        for child in children:
            assert nodes[child][PARENT] == node
            edge = _edge(tree, child)
            assert edge[0] == nodes[child][FIRST]
            for n in range(1, len(edge) + 1):
                counts[string + edge[:n]] = nodes[child][COUNT]
            todo.append((child, string + edge))
    free = 0
    node = int(inner.counters[FREE_NODE])
    while node:
        free, node = free + 1, nodes[node][NEXT]
    assert seen == inner.counters[LIVE] == inner.counters[ROWS] - free
    assert in_table == inner.counters[ENTRIES] == int((inner.table != 0).sum())
    pages = sum(-(-int(inner.sequences[sequence, SIZE]) // PAGE) for sequence in tree._order)
    assert pages == tree.pages
    return counts


def _edge(tree: SuffixTree, node: int) -> String:
    inner = tree._tree
    at, out = int(inner.nodes[node, AT]), []
    for _ in range(inner.nodes[node, LENGTH]):
        out.append(int(inner.tokens[at]))
        at = at + 1 if (at + 1) % PAGE else int(inner.next_page[at // PAGE]) * PAGE
    return tuple(out)
