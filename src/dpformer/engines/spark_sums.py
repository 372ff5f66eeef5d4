"""Sums of counts by Spark: parts of the histories are counted as arrays where they lie, and Spark adds up the parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from dpformer.engines.cells import Merging, cells_below
from dpformer.engines.spark_session import one_sentence, ship_code
from dpformer.engines.sums import WINDOW, ArraySums, Block, ranges_of_places

CELLS_AT_ONCE = 1 << 23  # cells of a block of sums
HISTORIES_AT_ONCE = 1 << 14

Each = Callable[[ArraySums], Iterable[Block]]


class SparkSums:
    """`Sums` of histories in a cluster; `parts` is an RDD of `ArraySums`, each of other users.

    A block of sums is added up by one worker and comes here alone: no more than its occurring cells are in one place.
    """

    def __init__(self, parts: Any, num_users: int) -> None:
        self.parts, self.num_users = parts, num_users
        ship_code(parts.context)

    def items(self, num_items: int) -> np.ndarray:
        return self._dense(lambda sums: sums.items(num_items), num_items)

    def all_pairs(self, places: np.ndarray) -> Iterator[Block]:
        num_items = len(places)
        occurrences = self._dense(lambda sums: sums.occurrences(num_items), num_items)
        ranges = [(0, int(places.max(initial=-1)) + 1)]
        if WINDOW * int(occurrences.sum()) > CELLS_AT_ONCE:
            ranges = ranges_of_places(places, occurrences, CELLS_AT_ONCE)
        with self._sent(places) as sent:
            yield from self._added(lambda sums: sums.all_pairs(sent.value), [cells_below(last) for _, last in ranges])

    def pairs(self, places: np.ndarray, survivors: np.ndarray, directed: bool) -> np.ndarray:
        if not len(survivors):
            return np.zeros(0, dtype=np.int64)
        with self._sent((places, survivors)) as sent:
            return self._dense(
                lambda sums: sums.pairs(sent.value[0], sent.value[1], directed), len(survivors) * (2 if directed else 1)
            )

    def shared(self, near: np.ndarray, num_items: int) -> np.ndarray:
        with self._sent(near) as sent:
            return self._dense(lambda sums: sums.shared(sent.value, num_items), 2)

    def _dense(self, each: Callable[[ArraySums], np.ndarray], width: int) -> np.ndarray:
        """(width,) int64: the sum over all parts of an array."""

        def occurring(sums: ArraySums) -> Iterator[Block]:
            found = each(sums)
            cells = np.flatnonzero(found)
            yield cells, found[cells]

        total = np.zeros(width, dtype=np.int64)
        for cells, values in self._added(occurring, [*range(CELLS_AT_ONCE, width, CELLS_AT_ONCE), width]):
            total[cells] = values
        return total

    def _added(self, each: Each, ends: Sequence[int]) -> Iterator[Block]:
        """Sums over all parts of what `each` makes of one, ascending by cell; block b has the cells below ends[b]."""

        def cut(parts: Iterable[ArraySums]) -> Iterator[tuple[int, Block]]:
            for sums in parts:
                for cells, values in each(sums):
                    edges = [0, *np.searchsorted(cells, ends).tolist()]
                    for block, (first, last) in enumerate(pairwise(edges)):
                        if first < last:
                            yield block, (cells[first:last], values[first:last])

        def add(blocks: Iterable[tuple[int, Block]]) -> Iterator[Block]:
            adding = Merging()
            for _, (cells, values) in blocks:
                adding.add(cells, values)
            return adding.results()

        with one_sentence("Spark cannot count"):
            found = self.parts.mapPartitions(cut).partitionBy(len(ends), int).mapPartitions(add)
            yield from found.toLocalIterator()

    @contextmanager
    def _sent(self, value: Any) -> Iterator[Any]:
        """A value that all workers have."""
        sent = self.parts.context.broadcast(value)
        try:
            yield sent
        finally:
            sent.destroy()


def spark_sums(session: Any, items: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> SparkSums:
    """Sums of histories in arrays, user u's items at items[starts[u]:stops[u]]."""
    parts = []
    for first in range(0, len(starts), HISTORIES_AT_ONCE):
        some = slice(first, first + HISTORIES_AT_ONCE)
        base = int(starts[first])
        parts.append(ArraySums(items[base : int(stops[some][-1])], starts[some] - base, stops[some] - base))
    ship_code(session.sparkContext)
    return SparkSums(session.sparkContext.parallelize(parts, len(parts)), len(starts))
