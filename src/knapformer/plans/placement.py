"""One sequence's placement as objects, and what makes placements legal: every token and every head once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from knapformer.errors import PlanError

Array = npt.NDArray[Any]


class Segment(NamedTuple):
    """``rank`` holds tokens ``start:end`` of a sequence in all token-wise work."""

    rank: int
    start: int
    end: int


class Tile(NamedTuple):
    """``rank`` computes the attention of some heads: rows ``query_start:query_end`` of the queries over all keys."""

    rank: int
    head_start: int
    head_end: int
    query_start: int
    query_end: int


class Placement(NamedTuple):
    """One sequence's segments, by start, and tiles, by head and query. Both are empty for a sequence of length 0."""

    id: int
    length: int
    home: int
    segments: tuple[Segment, ...]
    tiles: tuple[Tile, ...]
    lane: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that meet for this sequence."""
        return tuple(sorted({segment.rank for segment in self.segments} | {tile.rank for tile in self.tiles}))

    def to_dict(self) -> dict[str, Any]:
        """The sequence in a plan file."""
        tiles: list[dict[str, Any]] = []
        for rank, start, end, *queries in self.tiles:
            tiles.append({"rank": rank, "start": start, "end": end})
            if queries != [0, self.length]:
                tiles[-1]["queries"] = queries
        segments = [s._asdict() for s in self.segments]
        content = {"id": self.id, "length": self.length, "home": self.home, "tokens": segments, "heads": tiles}
        return {**content, "lane": self.lane} if self.lane else content


def check_cover(what: str, offsets: Array, start: Array, end: Array, total: Array) -> None:
    """Each sequence's ranges ``start:end``, in order, cover ``0:total`` once; none where ``total`` is 0.

    Raises:
        PlanError: naming the sequence.
    """
    counts = np.diff(offsets)
    fails = (counts > 0) != (total > 0)
    sequence = np.repeat(np.arange(len(total)), counts)
    first = np.zeros(len(start), bool)
    first[offsets[:-1][counts > 0]] = True
    expected = np.where(first, 0, np.concatenate([[0], end[:-1]])) if len(start) else start
    fails[sequence[(start != expected) | (end <= start)]] = True
    some = np.flatnonzero(counts > 0)
    fails[some[end[offsets[some + 1] - 1] != total[some]]] = True
    if fails.any():
        i = int(np.flatnonzero(fails)[0])
        ranges = list(
            zip(start[offsets[i] : offsets[i + 1]].tolist(), end[offsets[i] : offsets[i + 1]].tolist(), strict=True)
        )
        raise PlanError(f"sequence {i}: {what} 0:{total[i]} must be covered once and in order, got {ranges}")


def check_query_tiles(placement: Placement, num_heads: int) -> None:
    """Tiles that cover heads and rows: inside, disjoint, and of the right area.

    Raises:
        PlanError: naming the sequence and the tiles.
    """
    tiles = placement.tiles
    where = f"sequence {placement.id}"
    for t in tiles:
        inside = 0 <= t.head_start < t.head_end <= num_heads and 0 <= t.query_start < t.query_end <= placement.length
        if not inside:
            raise PlanError(f"{where}: {t} is not inside {num_heads} heads and {placement.length} rows")
    _check_disjoint(tiles, num_heads, where)
    area = sum((t.head_end - t.head_start) * (t.query_end - t.query_start) for t in tiles)
    if area != num_heads * placement.length:
        raise PlanError(f"{where}: tiles cover {area} of {num_heads * placement.length} (head, row) pairs")


def _check_disjoint(tiles: tuple[Tile, ...], num_heads: int, where: str) -> None:
    """No row of a head is in two tiles: taken by first row, a tile must not begin before its heads are free again."""
    free_from = np.zeros(num_heads, np.int64)
    taken_by = np.zeros(num_heads, np.int64)
    for at in sorted(range(len(tiles)), key=lambda index: tiles[index].query_start):
        t = tiles[at]
        heads = slice(t.head_start, t.head_end)
        busy = np.flatnonzero(free_from[heads] > t.query_start)
        if len(busy):
            first, second = sorted((int(taken_by[heads][busy[0]]), at))
            raise PlanError(f"{where}: {tiles[first]} and {tiles[second]} overlap")
        free_from[heads], taken_by[heads] = t.query_end, at
