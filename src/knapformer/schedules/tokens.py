"""From a plan to what one rank does: the rows that it holds, and the exchanges that it takes part in.

Everything is in *units*: a unit is what is never cut, a row of a routed tensor or one head of one token. An exchange
says which units leave, in order of destination, and where those that arrive, in order of source, go. Within a pair of
ranks units go in one canonical order (sequence, tile, segment, head, token), so the two need not talk about it.
The reversed exchange is derived, never written twice.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
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


@dataclass(frozen=True, eq=False)
class Exchange:
    """One rank's part in one all-to-all.

    Attributes:
        send: units of the input that leave, by destination.
        send_counts: (N,) units to each rank; 0 to itself.
        receive: units of the output that arrive, by source.
        receive_counts: (N,) units from each rank; 0 from itself.
        keep_from: units of the input that stay.
        keep_to: where in the output they go.
        num_in: units of the input.
        num_out: units of the output; each is written once, unless ``adds_up``.
        is_local: no rank sends anything, so that there is no collective; the same on every rank.
        has_copies: a unit of the input may go to several ranks, or nowhere.
        adds_up: a unit of the output is the sum of what arrives for it, in order of rank; 0 where nothing does.
    """

    send: Blocks
    send_counts: IntArray
    receive: Blocks
    receive_counts: IntArray
    keep_from: Blocks
    keep_to: Blocks
    num_in: int
    num_out: int
    is_local: bool
    has_copies: bool = False
    adds_up: bool = False

    @cached_property
    def reversed(self) -> Exchange:
        """What brings the output's units back to where they came from; the sum of them where there were copies."""
        return Exchange(
            self.receive,
            self.receive_counts,
            self.send,
            self.send_counts,
            self.keep_to,
            self.keep_from,
            self.num_out,
            self.num_in,
            self.is_local,
            has_copies=self.adds_up,
            adds_up=self.has_copies,
        )


@dataclass(frozen=True, eq=False)
class RankTokens:
    """The token segments that a rank holds, in the order in which it packs them: whole sequences first, then by id.

    Attributes:
        sequence, start, end: (B,) columns of the segments.
        num_whole: the first so many segments are whole sequences.
    """

    sequence: IntArray
    start: IntArray
    end: IntArray
    num_whole: int

    @classmethod
    def of(cls, plan: Plan, rank: int) -> RankTokens:
        own = np.flatnonzero(plan.segment_rank == rank)
        sequence, split = plan.segment_sequence[own], plan.is_split
        own, sequence = (x[np.argsort(split[sequence], kind="stable")] for x in (own, sequence))
        num_whole = int((~split[sequence]).sum())
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
    out = _clip(low, high, plan.segment_sequence, plan.segment_start, plan.segment_end)
    own = _clip(low, high, tokens.sequence, tokens.start, tokens.end)
    home_rows = _home_offsets(high - low, lengths)
    mine = lengths.homes[out["sequence"]] == rank
    send_from = home_rows[out["sequence"]] + out["start"] - low[out["sequence"]]
    return make_exchange(
        rank,
        plan.world_size,
        send=Blocks.of_rows(send_from[mine], out["count"][mine]),
        destination=plan.segment_rank.astype(np.int64)[out["index"]][mine],
        receive=Blocks.of_rows(starts_of(own["count"]), own["count"]),
        source=lengths.homes.astype(np.int64)[own["sequence"]],
        # The packed order has whole sequences first, the canonical one has not.
        order=np.lexsort((own["start"], own["sequence"])),
        num_in=int((high - low)[lengths.homes == rank].sum()),
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
    pairs = np.unique(plan.segment_sequence * plan.world_size + plan.segment_rank)
    sequence, holder = np.divmod(pairs, plan.world_size)
    mine = lengths.homes[sequence] == rank
    home_rows, own = _home_offsets(rows, lengths), tokens.sequence_ids
    return make_exchange(
        rank,
        plan.world_size,
        send=Blocks.of_rows(home_rows[sequence[mine]], rows[sequence[mine]]),
        destination=holder[mine],
        receive=Blocks.of_rows(starts_of(rows[own]), rows[own]),
        source=lengths.homes.astype(np.int64)[own],
        order=np.argsort(own, kind="stable"),
        num_in=int(rows[lengths.homes == rank].sum()),
        is_local=_all_at_home(plan, lengths),
        has_copies=True,
    )


def make_exchange(
    rank: int,
    num_ranks: int,
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
    out_order, in_order = np.argsort(destination, kind="stable"), np.argsort(source, kind="stable")
    send, destination = send.take(out_order), destination[out_order]
    receive, source = receive.take(in_order), source[in_order]
    counts = [
        np.bincount(other, blocks.sizes * (other != rank), minlength=num_ranks).astype(np.int64)
        for other, blocks in ((destination, send), (source, receive))
    ]
    return Exchange(
        send=send.take(destination != rank),
        send_counts=counts[0],
        receive=receive.take(source != rank),
        receive_counts=counts[1],
        keep_from=send.take(destination == rank),
        keep_to=receive.take(source == rank),
        num_in=num_in,
        num_out=num_out,
        is_local=is_local,
        has_copies=has_copies,
    )


def _clip(low: IntArray, high: IntArray, sequence: IntArray, start: IntArray, end: IntArray) -> Columns:
    """The parts of segments inside a window of their sequence; empty parts are left out."""
    start, end = np.maximum(start, low[sequence]), np.minimum(end, high[sequence])
    index = np.flatnonzero(end > start)
    return {"index": index, "sequence": sequence[index], "start": start[index], "count": (end - start)[index]}


def _all_at_home(plan: Plan, lengths: Lengths) -> bool:
    return bool((plan.segment_rank == lengths.homes[plan.segment_sequence]).all())


def _home_offsets(rows: IntArray, lengths: Lengths) -> IntArray:
    """(S,) the first row of each sequence in its home rank's tensor."""
    total = starts_of(rows)
    return total - total[lengths.offsets[lengths.homes]]


def starts_of(counts: IntArray) -> IntArray:
    """Running sum that starts at 0 and leaves the total out."""
    starts: IntArray = np.cumsum(counts) - counts
    return starts
