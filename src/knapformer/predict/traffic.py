"""What a plan's exchanges move: per rank and exchange, inside and between nodes, and between which ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from knapformer.given.cost import CostModel
from knapformer.plans.plan import Plan
from knapformer.schedules.attention import key_spans

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """One layer's forward exchanges, unscaled. Key and value heads count as many as query heads, as in ``evaluate``.

    Attributes:
        before_s, after_s: (N,) seconds of each rank's links for q, k and v, and for the output: its bytes, and the
            machine's latency for each of its peers.
        bytes: of all ranks, both exchanges.
        left, right: ranks of every pair that exchanges anything, both ways round, and each with itself; ascending.
    """

    before_s: FloatArray
    after_s: FloatArray
    bytes: float
    left: IntArray
    right: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The exchange that takes tokens from home to the ranks that hold them; the way back is the same turned round.

    Attributes:
        link_s: (N,) seconds of each rank's links.
        left, right: as in ``Traffic``.
    """

    link_s: FloatArray
    left: IntArray
    right: IntArray


def traffic(plan: Plan, cost: CostModel) -> Traffic:
    """The exchanges of ``plan`` on ``cost.machine``."""
    if plan.num_kv_heads != plan.num_heads:
        plan = replace(plan, num_kv_heads=plan.num_heads)
    num_ranks = plan.world_size
    split = plan.is_split
    segments = _rows(split, plan.segment_sequence, plan.segment_rank, plan.segment_start, plan.segment_end)
    heads = plan.tile_head_end - plan.tile_head_start
    tiles = _rows(split, plan.tile_sequence, plan.tile_rank, plan.tile_query_start, plan.tile_query_end, heads)
    source, target, query_units = _crossing(segments, tiles, plan.num_sequences)
    key_source, key_target, key_units = _crossing(segments, _key_tiles(plan, split), plan.num_sequences)

    unit_bytes = cost.bytes_per_head_token
    queries = _Flows.summed(source, target, query_units * unit_bytes, num_ranks)
    before = _Flows.summed(
        np.concatenate([source, key_source]),
        np.concatenate([target, key_target]),
        np.concatenate([query_units, 2 * key_units]) * unit_bytes,
        num_ranks,
    )
    left, right = _pairs(before, num_ranks)
    return Traffic(
        before_s=_link_s(before, cost, num_ranks),
        after_s=_link_s(_Flows(queries.target, queries.source, queries.bytes), cost, num_ranks),
        bytes=float(before.bytes.sum() + queries.bytes.sum()),
        left=left,
        right=right,
    )


def routing(plan: Plan, cost: CostModel, bytes_per_token: float) -> Routing:
    """Tokens on their way from home on ``cost.machine``."""
    counts = plan.segment_end - plan.segment_start
    source = np.asarray(plan.homes)[plan.segment_sequence].astype(np.int64)
    target = plan.segment_rank.astype(np.int64)
    moves = (source != target) & (counts > 0)
    sent = counts[moves] * bytes_per_token
    flows = _Flows.summed(source[moves], target[moves], sent, plan.world_size)
    return Routing(_link_s(flows, cost, plan.world_size), *_pairs(flows, plan.world_size))


@dataclass(frozen=True, slots=True, eq=False)
class _Flows:
    """(F,) bytes from one rank to another; each pair of ranks once, and only those that exchange something."""

    source: IntArray
    target: IntArray
    bytes: FloatArray

    @classmethod
    def summed(cls, source: IntArray, target: IntArray, sent: npt.NDArray[Any], num_ranks: int) -> _Flows:
        pairs, index = np.unique(source * num_ranks + target, return_inverse=True)
        first, second = np.divmod(pairs, num_ranks)
        return cls(first, second, np.bincount(index, sent, minlength=len(pairs)).astype(np.float64))


def _pairs(flows: _Flows, num_ranks: int) -> tuple[IntArray, IntArray]:
    """Every pair of ranks that exchanges anything, both ways round, and each of them with itself; ascending."""
    exchanging = np.unique(np.concatenate([flows.source, flows.target]))
    there, back = (a * num_ranks + b for a, b in ((flows.source, flows.target), (flows.target, flows.source)))
    left, right = np.divmod(np.unique(np.concatenate([there, back, exchanging * (num_ranks + 1)])), num_ranks)
    return left, right


def _rows(
    split: npt.NDArray[np.bool_], sequence: IntArray, rank: npt.NDArray[np.int32], *columns: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """(columns, rows of split sequences)."""
    table = np.stack([sequence, rank, *columns]).astype(np.int64)
    return np.asarray(table[:, split[sequence]])


def _key_tiles(plan: Plan, split: npt.NDArray[np.bool_]) -> IntArray:
    """The heads whose keys and values a rank needs, once each, as tiles of all rows."""
    columns = {
        "sequence": plan.tile_sequence,
        "rank": plan.tile_rank.astype(np.int64),
        "head_start": plan.tile_head_start.astype(np.int64),
        "head_end": plan.tile_head_end.astype(np.int64),
    }
    spans = key_spans({name: c[split[plan.tile_sequence]] for name, c in columns.items()}, plan)
    heads = spans["head_end"] - spans["head_start"]
    return np.stack([spans["sequence"], spans["rank"], spans["start"], spans["end"], heads])


def _crossing(segments: IntArray, tiles: IntArray, num_sequences: int) -> tuple[IntArray, IntArray, IntArray]:
    """(source rank, target rank, heads of tokens) of every segment and tile that meet on different ranks."""
    first = np.searchsorted(tiles[0], np.arange(num_sequences + 1))
    per_segment = np.diff(first)[segments[0]]
    segment = np.repeat(np.arange(segments.shape[1]), per_segment)
    offset = np.cumsum(per_segment) - per_segment
    tile = np.arange(len(segment)) - offset[segment] + first[segments[0]][segment]
    rows = np.minimum(segments[3][segment], tiles[3][tile]) - np.maximum(segments[2][segment], tiles[2][tile])
    crosses = (rows > 0) & (segments[1][segment] != tiles[1][tile])
    segment, tile, rows = segment[crosses], tile[crosses], rows[crosses]
    return segments[1][segment], tiles[1][tile], rows * tiles[4][tile]


def _link_s(flows: _Flows, cost: CostModel, num_ranks: int) -> FloatArray:
    """(N,) seconds: the larger direction inside nodes, the larger one between them, and the latency of each peer."""
    machine = cost.machine
    node = machine.rank_nodes(num_ranks)
    near = node[flows.source] == node[flows.target]
    seconds = np.zeros(num_ranks)
    for mask, bandwidth in ((near, machine.intra_node_bytes_per_s), (~near, machine.inter_node_bytes_per_s)):
        out, into = (
            np.bincount(ends[mask], flows.bytes[mask], minlength=num_ranks) for ends in (flows.source, flows.target)
        )
        seconds += np.maximum(out, into) / bandwidth
    return seconds + machine.latency_s * _num_peers(flows, num_ranks)


def _num_peers(flows: _Flows, num_ranks: int) -> IntArray:
    """(N,) ranks that each rank sends to or receives from, each counted once."""
    pairs = np.concatenate([flows.source * num_ranks + flows.target, flows.target * num_ranks + flows.source])
    return np.bincount(np.unique(pairs) // num_ranks, minlength=num_ranks)
