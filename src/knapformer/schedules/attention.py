"""What one rank does in attention: the heads that its tokens go to, and the tiles that it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from knapformer.plans.plan import Plan
from knapformer.schedules.joint import JointExchange
from knapformer.schedules.tokens import Blocks, Columns, Exchange, IntArray, RankTokens, make_exchange, starts_of


@dataclass(frozen=True, eq=False)
class AttentionSchedule:
    """What a rank does in attention. Units are heads of tokens, of the rows after the whole sequences' rows.

    The received q, k and v lie in *entries*: the rows of one head of one sequence, one after another.

    Attributes:
        whole_lengths: tokens of the whole sequences on this rank; their rows come first and never travel.
        queries: exchange of q, and reversed of the output.
        keys: exchange of k, and of v.
        query_lengths: (E,) rows of each entry of q: one for each head of each tile.
        key_lengths: (K,) rows of each entry of k and v.
        key_of_query: (E,) which entry of k and v an entry of q attends to.
        query_ends: (E,) position in its sequence after each entry's last query: so many keys a causal entry attends to.
        is_local: no rank exchanges anything; the same on every rank.
    """

    whole_lengths: tuple[int, ...]
    queries: Exchange
    keys: Exchange
    query_lengths: IntArray
    key_lengths: IntArray
    key_of_query: IntArray
    query_ends: IntArray
    is_local: bool

    @cached_property
    def before(self) -> JointExchange:
        """q, k and v to the ranks that compute their heads."""
        return JointExchange.of([self.queries, self.keys, self.keys])

    @cached_property
    def after(self) -> JointExchange:
        """The reversed one brings the output back."""
        return JointExchange.of([self.queries])


def attention_schedule(
    plan: Plan,
    tokens: RankTokens,
    rank: int,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    lane: int = 0,
) -> AttentionSchedule:
    """The exchanges before and after attention of ``rank``.

    Args:
        plan: the plan by which ``tokens`` are packed.
        tokens: those of ``rank`` in the lane.
        rank: in the balancing group.
        num_heads, num_kv_heads: of the model, where they are not the plan's; see ``Plan.with_heads``.
        lane: of the sequences that are attended to.
    """
    # The plan for other heads may have a sequence in one piece whose rows are packed with those of split ones.
    split = plan.is_split & (plan.lanes == lane)
    if num_heads is not None:
        plan = plan.with_heads(num_heads, num_kv_heads)
    # Only sequences in which this rank has a part: what is made here does not grow with the world.
    own_tiles = plan.tile_sequence[plan.tile_rank == rank]
    involved = np.zeros(plan.num_sequences, bool)
    involved[tokens.sequence[tokens.num_whole :]] = involved[own_tiles] = True
    involved &= split
    segments, tiles = _columns_of(plan, involved)
    spans, is_local = key_spans(tiles, plan), not split.any()
    rest = slice(tokens.num_whole, None)
    split_tokens = RankTokens(tokens.sequence[rest], tokens.start[rest], tokens.end[rest], 0)
    own_tiles, own_spans = (_where(t, t["rank"] == rank) for t in (tiles, spans))
    heads = own_tiles["head_end"] - own_tiles["head_start"]
    span_heads = own_spans["head_end"] - own_spans["head_start"]
    return AttentionSchedule(
        whole_lengths=tuple(tokens.lengths[: tokens.num_whole].tolist()),
        queries=_head_exchange(plan, rank, segments, tiles, split_tokens, plan.num_heads, is_local),
        keys=_head_exchange(plan, rank, segments, spans, split_tokens, plan.num_kv_heads, is_local),
        query_lengths=np.repeat(own_tiles["end"] - own_tiles["start"], heads),
        key_lengths=np.repeat(own_spans["end"] - own_spans["start"], span_heads),
        key_of_query=_key_of_query(own_tiles, own_spans, plan.num_heads // plan.num_kv_heads),
        query_ends=np.repeat(own_tiles["end"], heads),
        is_local=is_local,
    )


def _head_exchange(
    plan: Plan, rank: int, segments: Columns, tiles: Columns, own: RankTokens, num_heads: int, is_local: bool
) -> Exchange:
    """Tokens by segment with all heads, to tiles of heads ``head_start:head_end`` and rows ``start:end``."""
    held = segments["rank"] == rank
    # Segments of this rank in packed order, with their first row: packed order is by (sequence, start), as is `held`.
    row_of = np.full(len(held), -1, np.int64)
    row_of[held] = starts_of(own.lengths)
    entry_of = np.full(len(tiles["rank"]), -1, np.int64)
    mine = tiles["rank"] == rank
    tile_sizes = (tiles["head_end"] - tiles["head_start"]) * (tiles["end"] - tiles["start"])
    entry_of[mine] = starts_of(tile_sizes[mine])

    tile, segment = _pairs(tiles["sequence"], segments["sequence"], mine, held, plan.num_sequences)
    low = np.maximum(tiles["start"][tile], segments["start"][segment])
    high = np.minimum(tiles["end"][tile], segments["end"][segment])
    met = high > low
    tile, segment, low, count = tile[met], segment[met], low[met], (high - low)[met]
    head, heads = tiles["head_start"][tile], (tiles["head_end"] - tiles["head_start"])[tile]
    rows = (tiles["end"] - tiles["start"])[tile]
    leaves, arrives = held[segment], mine[tile]
    send_start = (row_of[segment] + low - segments["start"][segment]) * num_heads + head
    receive_start = entry_of[tile] + low - tiles["start"][tile]
    covered = np.bincount(tiles["sequence"], tile_sizes, minlength=plan.num_sequences)
    has_copies = bool((covered > plan.lengths * num_heads).any())
    return make_exchange(
        rank,
        send=Blocks.of(send_start, heads, 1, count, num_heads).take(leaves),
        destination=tiles["rank"][tile][leaves],
        receive=Blocks.of(receive_start, heads, rows, count, 1).take(arrives),
        source=segments["rank"][segment][arrives],
        num_in=own.num_rows * num_heads,
        is_local=is_local,
        has_copies=has_copies,
    )


def _pairs(
    left: IntArray, right: IntArray, mine: npt.NDArray[np.bool_], held: npt.NDArray[np.bool_], num_sequences: int
) -> tuple[IntArray, IntArray]:
    """Indices of every (left, right) of the same sequence in which this rank has a part, in order of both.

    Both columns of sequence ids are ascending.
    """
    first = np.searchsorted(right, np.arange(num_sequences + 1))
    per_left = np.diff(first)[left]
    some = np.flatnonzero(per_left)
    pair_left = np.repeat(some, per_left[some])
    pair_right = (
        np.arange(len(pair_left)) - np.repeat(starts_of(per_left[some]), per_left[some]) + first[left[pair_left]]
    )
    own = mine[pair_left] | held[pair_right]
    return pair_left[own], pair_right[own]


def key_spans(tiles: Columns, plan: Plan) -> Columns:
    """The key-value heads that each rank needs of each sequence: the union over its tiles, whatever their rows."""
    group = plan.num_heads // plan.num_kv_heads
    start, end = tiles["head_start"] // group, -(-tiles["head_end"] // group)
    key = tiles["sequence"] * plan.world_size + tiles["rank"]
    order = np.lexsort((start, key))
    start, end, key = start[order], end[order], key[order]
    reach = np.maximum.accumulate(key * (plan.num_kv_heads + 1) + end)
    opens = np.ones(len(key), bool)
    opens[1:] = (key[1:] != key[:-1]) | (start[1:] > reach[:-1] - key[1:] * (plan.num_kv_heads + 1))
    at = np.flatnonzero(opens)
    last = np.append(at[1:], len(key))[: len(at)] - 1
    sequence, rank = np.divmod(key[at], plan.world_size)
    return {
        "sequence": sequence,
        "rank": rank,
        "start": np.zeros_like(sequence),
        "end": plan.lengths[sequence],
        "head_start": start[at],
        "head_end": reach[last] - key[at] * (plan.num_kv_heads + 1),
    }


def _key_of_query(tiles: Columns, spans: Columns, group: int) -> IntArray:
    """For each (tile, head): the entry, among the spans' (span, head) entries, of its key-value head."""
    heads = tiles["head_end"] - tiles["head_start"]
    head = np.arange(heads.sum()) - np.repeat(starts_of(heads), heads) + np.repeat(tiles["head_start"], heads)
    sequence = np.repeat(tiles["sequence"], heads)
    span_heads = spans["head_end"] - spans["head_start"]
    # Spans are ordered by (sequence, head): find the last one that does not start after the head.
    stride = int(spans["head_end"].max(initial=0)) + 1
    first_key, wanted = spans["sequence"] * stride + spans["head_start"], sequence * stride + head // group
    span = np.searchsorted(first_key, wanted, "right") - 1
    entry: IntArray = starts_of(span_heads)[span] + head // group - spans["head_start"][span]
    return entry


def _columns_of(plan: Plan, wanted: npt.NDArray[np.bool_]) -> tuple[Columns, Columns]:
    """Segments and tiles of the wanted sequences."""
    segments = _columns(plan.segment_sequence, plan.segment_rank, plan.segment_start, plan.segment_end)
    tiles = _columns(plan.tile_sequence, plan.tile_rank, plan.tile_query_start, plan.tile_query_end)
    tiles |= {"head_start": plan.tile_head_start.astype(np.int64), "head_end": plan.tile_head_end.astype(np.int64)}
    return _where(segments, wanted[segments["sequence"]]), _where(tiles, wanted[tiles["sequence"]])


def _columns(sequence: IntArray, rank: npt.NDArray[np.int32], start: IntArray, end: IntArray) -> Columns:
    return {"sequence": sequence, "rank": rank.astype(np.int64), "start": start, "end": end}


def _where(columns: Mapping[str, IntArray], mask: npt.NDArray[np.bool_]) -> Columns:
    return {name: column[mask] for name, column in columns.items()}
