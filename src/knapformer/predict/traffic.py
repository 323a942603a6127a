"""What a plan's exchanges move: per rank and exchange, inside and between nodes, and between which ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        before_s, after_s: (N,) seconds of each rank's links for q, k and v, and for the output.
        bytes: of all ranks, both exchanges.
        left, right: ranks of every pair that exchanges anything, both ways round, and each with itself; ascending.
    """

    before_s: FloatArray
    after_s: FloatArray
    bytes: float
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
    queries = np.zeros((num_ranks, num_ranks))
    np.add.at(queries, (source, target), query_units * unit_bytes)
    before = queries.copy()
    np.add.at(before, (key_source, key_target), 2 * key_units * unit_bytes)

    meets = (before + queries) > 0
    meets |= meets.T
    exchanging = meets.any(axis=1)
    meets[exchanging, exchanging] = True
    left, right = np.nonzero(meets)
    return Traffic(
        before_s=_link_s(before, cost),
        after_s=_link_s(queries.T, cost),
        bytes=float(before.sum() + queries.sum()),
        left=left,
        right=right,
    )


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


def _link_s(flow: FloatArray, cost: CostModel) -> FloatArray:
    """(N,) seconds: the larger direction inside nodes, and the larger direction between them."""
    machine = cost.machine
    node = machine.rank_nodes(len(flow))
    near = node[:, None] == node[None, :]
    seconds = np.zeros(len(flow))
    for mask, bandwidth in ((near, machine.intra_node_bytes_per_s), (~near, machine.inter_node_bytes_per_s)):
        chosen = np.where(mask, flow, 0.0)
        seconds += np.maximum(chosen.sum(axis=1), chosen.sum(axis=0)) / bandwidth
    return seconds
