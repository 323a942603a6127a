"""From a plan to what one rank does: the rows that it holds, and the exchanges that it takes part in.

Everything is in *units*: a unit is what is never cut, a row of a routed tensor or one head of one token. An exchange
says which units leave, in order of destination, and where those that arrive, in order of source, go. Within a pair of
ranks units go in one canonical order (sequence, tile, segment, head, token), so the two need not talk about it.
The reversed exchange is derived, never written twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from knapformer.errors import ConfigurationError
from knapformer.given.lengths import Lengths
from knapformer.plans.plan import Plan

IntArray = npt.NDArray[np.int64]
Columns = dict[str, IntArray]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Units of a flat tensor, as (B,) strided blocks: ``start + o · outer_stride + i · inner_stride``, i fastest."""

    start: IntArray
    outer: IntArray
    outer_stride: IntArray
    inner: IntArray
    inner_stride: IntArray

    @classmethod
    def of(cls, start: Any, outer: Any, outer_stride: Any, inner: Any, inner_stride: Any) -> Blocks:
        """Blocks from arrays and scalars that broadcast."""
        parts = np.broadcast_arrays(start, outer, outer_stride, inner, inner_stride)
        return cls(*(np.ascontiguousarray(part, np.int64).reshape(-1) for part in parts))

    @classmethod
    def of_rows(cls, start: IntArray, count: IntArray) -> Blocks:
        """Runs of ``count`` consecutive units."""
        return cls.of(start, 1, 0, count, 1)

    @property
    def sizes(self) -> IntArray:
        """(B,) units of each block."""
        return self.outer * self.inner

    @property
    def num_units(self) -> int:
        return int(self.sizes.sum())

    def take(self, index: npt.NDArray[Any]) -> Blocks:
        """Some of the blocks."""
        return Blocks(*(getattr(self, f.name)[index] for f in fields(self)))

    def moved(self, units: int) -> Blocks:
        """The same blocks of a tensor that begins ``units`` units later."""
        return replace(self, start=self.start + units) if units else self

    @classmethod
    def joined(cls, parts: Sequence[Blocks]) -> Blocks:
        """The blocks of all parts, one part after another."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def followed_by(self, other: Blocks) -> Blocks:
        return Blocks.joined([self, other])


@dataclass(frozen=True, eq=False)
class Exchange:
    """One rank's part in one all-to-all. It knows the rank's peers only, however many other ranks there are.

    Attributes:
        send: units of the input that leave, by destination.
        destination: (B,) rank that each of these blocks goes to, ascending; never this rank.
        receive: units of the output that arrive, by source.
        source: (B,) rank that each of these blocks comes from, ascending; never this rank.
        keep_from: units of the input that stay.
        keep_to: where in the output they go.
        num_in: units of the input.
        num_out: units of the output; each is written once, unless ``adds_up``.
        is_local: no rank sends anything, so that there is no collective; the same on every rank.
        has_copies: a unit of the input may go to several ranks, or nowhere.
        adds_up: a unit of the output is the sum of what arrives for it, in order of rank; 0 where nothing does.
        rank: this rank.
    """

    send: Blocks
    destination: IntArray
    receive: Blocks
    source: IntArray
    keep_from: Blocks
    keep_to: Blocks
    num_in: int
    num_out: int
    is_local: bool
    has_copies: bool = False
    adds_up: bool = False
    rank: int = 0

    @cached_property
    def peers(self) -> IntArray:
        """(P,) ranks that this one exchanges something with, ascending."""
        return np.union1d(self.destination, self.source)

    @cached_property
    def send_counts(self) -> IntArray:
        """(P,) units to each peer."""
        return _units_by_peer(self.peers, self.destination, self.send)

    @cached_property
    def receive_counts(self) -> IntArray:
        """(P,) units from each peer."""
        return _units_by_peer(self.peers, self.source, self.receive)

    @cached_property
    def reversed(self) -> Exchange:
        """What brings the output's units back to where they came from; the sum of them where there were copies."""
        return Exchange(
            self.receive,
            self.source,
            self.send,
            self.destination,
            self.keep_to,
            self.keep_from,
            self.num_out,
            self.num_in,
            self.is_local,
            has_copies=self.adds_up,
            adds_up=self.has_copies,
            rank=self.rank,
        )


def _units_by_peer(peers: IntArray, other: IntArray, blocks: Blocks) -> IntArray:
    return np.bincount(np.searchsorted(peers, other), blocks.sizes, minlength=len(peers)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class RankTokens:
    """The token segments that a rank holds, in the order in which it packs them: by lane; in a lane whole sequences
    first; then by id.

    Attributes:
        sequence, start, end: (B,) columns of the segments.
        num_whole: the first so many segments are whole sequences; of one lane, all of them.
    """

    sequence: IntArray
    start: IntArray
    end: IntArray
    num_whole: int

    @classmethod
    def of(cls, plan: Plan, rank: int, lane: int | None = None) -> RankTokens:
        """The segments of ``rank``; with ``lane`` those of that lane only."""
        own = np.flatnonzero(plan.segment_rank == rank)
        sequence, split, lanes = plan.segment_sequence[own], plan.is_split, plan.lanes
        if lane is not None:
            own, sequence = (x[lanes[sequence] == lane] for x in (own, sequence))
        order = np.lexsort((split[sequence], lanes[sequence]))
        own, sequence = own[order], sequence[order]
        num_whole = int((np.cumsum(split[sequence]) == 0).sum())
        return cls(sequence, plan.segment_start[own], plan.segment_end[own], num_whole)

    @cached_property
    def lengths(self) -> IntArray:
        """(B,) tokens of each segment."""
        lengths: IntArray = self.end - self.start
        return lengths

    @property
    def num_rows(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_whole_rows(self) -> int:
        return int(self.lengths[: self.num_whole].sum())

    @cached_property
    def _first_segments(self) -> IntArray:
        """(S_local,) the first segment of each sequence."""
        return np.flatnonzero(np.diff(self.sequence, prepend=-1))

    @cached_property
    def sequence_ids(self) -> IntArray:
        """(S_local,) the sequences of which the rank holds a token, in packed order."""
        return self.sequence[self._first_segments]

    @cached_property
    def sequence_tokens(self) -> IntArray:
        """(S_local,) tokens of each of those sequences on this rank."""
        return np.diff(np.append(starts_of(self.lengths)[self._first_segments], self.num_rows))


def window(lengths: Lengths, stream: str | None) -> tuple[IntArray, IntArray]:
    """(S,) first and last token of ``stream`` inside each sequence; the whole sequence for None.

    Raises:
        ConfigurationError: there is no such stream.
    """
    if stream is None:
        return np.zeros_like(lengths.tokens), lengths.tokens
    names = [name for name, _ in lengths.streams]
    if stream not in names:
        raise ConfigurationError(f"no stream {stream!r}: the lengths have {names or 'no named streams'}")
    starts = lengths.stream_starts()
    return starts[names.index(stream)], starts[names.index(stream) + 1]


def token_exchange(plan: Plan, lengths: Lengths, tokens: RankTokens, rank: int, stream: str | None = None) -> Exchange:
    """Rows of the home rank, sequence after sequence, to the rows of the ranks that hold them. One unit is one row."""
    low, high = window(lengths, stream)
    first, last = lengths.offsets[rank : rank + 2].tolist()
    rows = slice(*plan.segment_offsets[[first, last]].tolist())
    sequence = np.repeat(np.arange(first, last), np.diff(plan.segment_offsets[first : last + 1]))
    out = _clip(low, high, sequence, plan.segment_start[rows], plan.segment_end[rows])
    own = _clip(low, high, tokens.sequence, tokens.start, tokens.end)
    home_rows = starts_of(high[first:last] - low[first:last])
    return make_exchange(
        rank,
        send=Blocks.of_rows(home_rows[out["sequence"] - first] + out["start"] - low[out["sequence"]], out["count"]),
        destination=plan.segment_rank[rows].astype(np.int64)[out["index"]],
        receive=Blocks.of_rows(starts_of(own["count"]), own["count"]),
        source=lengths.homes[own["sequence"]].astype(np.int64),
        # The packed order has lanes, and whole sequences first; the canonical one has neither.
        order=np.lexsort((own["start"], own["sequence"])),
        num_in=int((high[first:last] - low[first:last]).sum()),
        is_local=_all_at_home(plan, lengths),
    )


def conditioning_exchange(
    plan: Plan, lengths: Lengths, tokens: RankTokens, rank: int, rows: IntArray | None = None
) -> Exchange:
    """Rows of each sequence to every rank that holds one of its tokens.

    Args:
        rows: (S,) conditioning rows of each sequence; 1 by default.
    """
    rows = np.ones_like(lengths.tokens) if rows is None else rows
    first, last = lengths.offsets[rank : rank + 2].tolist()
    holders = plan.segment_rank[slice(*plan.segment_offsets[[first, last]].tolist())]
    sequence = np.repeat(np.arange(first, last), np.diff(plan.segment_offsets[first : last + 1]))
    sequence, holder = np.divmod(np.unique(sequence * plan.world_size + holders), plan.world_size)
    own, home_rows = tokens.sequence_ids, starts_of(rows[first:last])
    return make_exchange(
        rank,
        send=Blocks.of_rows(home_rows[sequence - first], rows[sequence]),
        destination=holder,
        receive=Blocks.of_rows(starts_of(rows[own]), rows[own]),
        source=lengths.homes[own].astype(np.int64),
        order=np.argsort(own, kind="stable"),
        num_in=int(rows[first:last].sum()),
        is_local=_all_at_home(plan, lengths),
        has_copies=True,
    )


def make_exchange(
    rank: int,
    *,
    send: Blocks,
    destination: IntArray,
    receive: Blocks,
    source: IntArray,
    num_in: int,
    is_local: bool,
    order: IntArray | None = None,
    has_copies: bool = False,
) -> Exchange:
    """Put blocks in order of the other rank; ``order`` brings ``receive`` into canonical order first."""
    num_out = receive.num_units
    if order is not None:
        receive, source = receive.take(order), source[order]
    send, destination = _by_rank(send, destination)
    receive, source = _by_rank(receive, source)
    leaves, arrives = destination != rank, source != rank
    return Exchange(
        send=send.take(leaves),
        destination=destination[leaves],
        receive=receive.take(arrives),
        source=source[arrives],
        keep_from=send.take(~leaves),
        keep_to=receive.take(~arrives),
        num_in=num_in,
        num_out=num_out,
        is_local=is_local,
        has_copies=has_copies,
        rank=rank,
    )


def _by_rank(blocks: Blocks, other: IntArray) -> tuple[Blocks, IntArray]:
    """In order of the other rank, without blocks of no units: who exchanges nothing is no peer."""
    some = np.flatnonzero(blocks.sizes)
    order = some[np.argsort(other[some], kind="stable")]
    return blocks.take(order), other[order]


def _clip(low: IntArray, high: IntArray, sequence: IntArray, start: IntArray, end: IntArray) -> Columns:
    """The parts of segments inside a window of their sequence; empty parts are left out."""
    start, end = np.maximum(start, low[sequence]), np.minimum(end, high[sequence])
    index = np.flatnonzero(end > start)
    return {"index": index, "sequence": sequence[index], "start": start[index], "count": (end - start)[index]}


def _all_at_home(plan: Plan, lengths: Lengths) -> bool:
    return bool((plan.segment_rank == lengths.homes[plan.segment_sequence]).all())


def starts_of(counts: IntArray) -> IntArray:
    """Running sum that starts at 0 and leaves the total out."""
    starts: IntArray = np.cumsum(counts) - counts
    return starts
