"""The plan of one step: which rank holds which tokens, and which rank computes which heads of which sequence.

A plan is columnar: NumPy arrays with offsets, because one object per segment costs more than planning. It is checked
once, when it is made, and frozen. ``plan.placement(i)`` shows one sequence as objects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from knapformer.errors import ConfigurationError, PlanError
from knapformer.given.cost import MAX_HEADS
from knapformer.given.files import checked_object, read_object
from knapformer.given.lengths import MAX_LENGTH_TOKENS, MAX_RANKS, Lengths, integer_column
from knapformer.plans.placement import Placement, Segment, Tile, check_cover, check_query_tiles

__all__ = ["SCHEMA", "Placement", "Plan", "Segment", "Tile"]

SCHEMA = "knapformer.plan/1"
Array = npt.NDArray[Any]

_DTYPES = {
    "lengths": np.int64,
    "homes": np.int32,
    "lane": np.int8,
    "segment_offsets": np.int64,
    "segment_rank": np.int32,
    "segment_start": np.int64,
    "segment_end": np.int64,
    "tile_offsets": np.int64,
    "tile_rank": np.int32,
    "tile_head_start": np.int32,
    "tile_head_end": np.int32,
    "tile_query_start": np.int64,
    "tile_query_end": np.int64,
}


COLUMNS = ("lane", *(name for name in _DTYPES if name.startswith(("segment", "tile"))))
"""In the order in which C++ takes and gives them (csrc/module.cpp)."""


def _one_lane() -> Array:
    return np.zeros(0, np.int8)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan:
    """Placements of all sequences of a balancing group. Identical on every rank.

    Attributes:
        world_size: ranks of the balancing group.
        num_heads: query heads that the tiles cut.
        num_kv_heads: key and value heads; it divides ``num_heads``.
        planner: name of the planner.
        lengths: (S,) tokens of each sequence.
        homes: (S,) rank that loaded each sequence, ascending.
        segment_offsets: (S + 1,) rows ``segment_offsets[i]:segment_offsets[i + 1]`` of the segment columns.
        segment_rank, segment_start, segment_end: the segments of each sequence by start.
        tile_offsets: (S + 1,) the same for the tile columns.
        tile_rank, tile_head_start, tile_head_end, tile_query_start, tile_query_end: the tiles by head and query.
        lane: (S,) 0 or 1, the lane that a sequence runs in, where ranks take turns between two lanes; empty where there
            is one.
        group_offset: world rank of local rank 0, where balancing groups repeat.
        max_tokens_per_rank: caps under which the plan was made, one per rank; empty means none.
        reason: what won, where the planner compares several plans: ``"own layout"``, ``"whole sequences"``, or another
            planner's name. Plans that differ in nothing else are equal.

    Raises:
        PlanError: a token or head that is not placed exactly once, or a rank that does not exist.
    """

    world_size: int
    num_heads: int
    num_kv_heads: int
    planner: str
    lengths: npt.NDArray[np.int64]
    homes: npt.NDArray[np.int32]
    segment_offsets: npt.NDArray[np.int64]
    segment_rank: npt.NDArray[np.int32]
    segment_start: npt.NDArray[np.int64]
    segment_end: npt.NDArray[np.int64]
    tile_offsets: npt.NDArray[np.int64]
    tile_rank: npt.NDArray[np.int32]
    tile_head_start: npt.NDArray[np.int32]
    tile_head_end: npt.NDArray[np.int32]
    tile_query_start: npt.NDArray[np.int64]
    tile_query_end: npt.NDArray[np.int64]
    lane: npt.NDArray[np.int8] = field(default_factory=_one_lane)
    group_offset: int = 0
    max_tokens_per_rank: tuple[int, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            object.__setattr__(self, name, integer_column(name, getattr(self, name), dtype, PlanError))
        for name in ("world_size", "num_heads", "num_kv_heads", "group_offset"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        caps = tuple(_whole("max_tokens_per_rank", cap) for cap in self.max_tokens_per_rank)
        object.__setattr__(self, "max_tokens_per_rank", caps)
        _check(self)

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_lanes(self) -> int:
        return 2 if len(self.lane) else 1

    @property
    def lanes(self) -> Array:
        """(S,) the lane of each sequence; 0 where there is one lane."""
        return self.lane if len(self.lane) else np.zeros(self.num_sequences, np.int8)

    @property
    def columns(self) -> tuple[Array, ...]:
        """What a planner decided, in the order of ``COLUMNS``."""
        return tuple(getattr(self, name) for name in COLUMNS)

    @property
    def segment_sequence(self) -> npt.NDArray[np.int64]:
        """The sequence id of each segment."""
        return np.repeat(np.arange(self.num_sequences), np.diff(self.segment_offsets))

    @property
    def tile_sequence(self) -> npt.NDArray[np.int64]:
        """The sequence id of each tile."""
        return np.repeat(np.arange(self.num_sequences), np.diff(self.tile_offsets))

    @property
    def is_split(self) -> npt.NDArray[np.bool_]:
        """(S,) whether a sequence has more than one segment or tile, or its heads away from its tokens."""
        split: npt.NDArray[np.bool_] = (np.diff(self.segment_offsets) > 1) | (np.diff(self.tile_offsets) > 1)
        single = np.flatnonzero(~split & (self.lengths > 0))
        apart = self.segment_rank[self.segment_offsets[single]] != self.tile_rank[self.tile_offsets[single]]
        split[single[apart]] = True
        return split

    @property
    def rank_tokens(self) -> npt.NDArray[np.int64]:
        """(N,) tokens that each rank holds."""
        weights = self.segment_end - self.segment_start
        return np.bincount(self.segment_rank, weights, minlength=self.world_size).astype(np.int64)

    def placement(self, sequence: int) -> Placement:
        """One sequence as objects."""
        first, last = self.segment_offsets[sequence : sequence + 2].tolist()
        segments = zip(*(c[first:last].tolist() for c in self._segment_columns()), strict=True)
        first, last = self.tile_offsets[sequence : sequence + 2].tolist()
        tiles = zip(*(c[first:last].tolist() for c in self._tile_columns()), strict=True)
        return Placement(
            sequence,
            int(self.lengths[sequence]),
            int(self.homes[sequence]),
            tuple(Segment(*s) for s in segments),
            tuple(Tile(*t) for t in tiles),
            int(self.lane[sequence]) if len(self.lane) else 0,
        )

    def with_heads(self, num_heads: int, num_kv_heads: int | None = None) -> Plan:
        """The same placement for a model with other heads: each tile keeps its share, rounded to whole heads."""
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if (num_heads, num_kv_heads) == (self.num_heads, self.num_kv_heads):
            return self
        start, end = (
            (2 * bound.astype(np.int64) * num_heads + self.num_heads) // (2 * self.num_heads)
            for bound in (self.tile_head_start, self.tile_head_end)
        )
        kept = end > start
        counts = np.bincount(self.tile_sequence[kept], minlength=self.num_sequences)
        return replace(
            self,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            tile_offsets=np.concatenate([[0], np.cumsum(counts)]),
            tile_rank=self.tile_rank[kept],
            tile_head_start=start[kept].astype(np.int32),
            tile_head_end=end[kept].astype(np.int32),
            tile_query_start=self.tile_query_start[kept],
            tile_query_end=self.tile_query_end[kept],
        )

    def digest(self) -> bytes:
        """32 bytes that are equal exactly where plans are (SHA-256 of their content, the reason left out)."""
        scalars = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in (*_DTYPES, "reason")}
        sha = hashlib.sha256(json.dumps(scalars).encode())
        for name in _DTYPES:
            array = getattr(self, name)
            sha.update(len(array).to_bytes(8, "little"))
            sha.update(array.astype(array.dtype.newbyteorder("<"), copy=False).data)
        return sha.digest()

    def to_dict(self) -> dict[str, Any]:
        """The content of a plan file."""
        content: dict[str, Any] = {
            "schema": SCHEMA,
            "world_size": self.world_size,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "planner": self.planner,
        }
        if self.group_offset:
            content["group_offset"] = self.group_offset
        if self.max_tokens_per_rank:
            content["max_tokens_per_rank"] = list(self.max_tokens_per_rank)
        if len(self.lane):
            content["lanes"] = 2
        if self.reason:
            content["reason"] = self.reason
        content["sequences"] = [self.placement(i).to_dict() for i in range(self.num_sequences)]
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Plan:
        """Read the content of a plan file; unknown keys are left out.

        Raises:
            ConfigurationError: another schema, or a key is missing.
            PlanError: the placements are no plan.
        """
        if not isinstance(content, Mapping):
            raise ConfigurationError(f"a plan file is a JSON object, got {type(content).__name__}")
        if content.get("schema") != SCHEMA:
            raise ConfigurationError(f"expected a plan file with schema {SCHEMA!r}, got {content.get('schema')!r}")
        from knapformer.plans.plan_file import PlanFile

        checked_object(PlanFile, content, "a plan file")
        try:
            sequences = sorted(content["sequences"], key=lambda s: s["id"])
            if [s["id"] for s in sequences] != list(range(len(sequences))):
                raise PlanError(f"sequence ids must be 0..{len(sequences) - 1}, each once")
            segments = [[(x["rank"], x["start"], x["end"]) for x in s["tokens"]] for s in sequences]
            tiles = [
                [(x["rank"], x["start"], x["end"], *x.get("queries", (0, s["length"]))) for x in s["heads"]]
                for s in sequences
            ]
            return cls.from_placements(
                lengths=[s["length"] for s in sequences],
                homes=[s["home"] for s in sequences],
                segments=segments,
                tiles=tiles,
                world_size=content["world_size"],
                num_heads=content["num_heads"],
                num_kv_heads=content.get("num_kv_heads", content["num_heads"]),
                planner=content.get("planner", ""),
                group_offset=content.get("group_offset", 0),
                max_tokens_per_rank=tuple(content.get("max_tokens_per_rank", ())),
                reason=content.get("reason", ""),
                lane=_read_lanes(content.get("lanes", 1), [s.get("lane", 0) for s in sequences]),
            )
        except PlanError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(f"a plan file with a missing or malformed part: {error!r}") from None

    @classmethod
    def from_placements(
        cls,
        *,
        lengths: Sequence[int],
        homes: Sequence[int],
        segments: Sequence[Sequence[tuple[int, int, int]]],
        tiles: Sequence[Sequence[tuple[int, int, int, int, int]]],
        **scalars: Any,
    ) -> Plan:
        """Build a plan from one list of ``Segment`` and of ``Tile`` tuples per sequence, in any order."""
        flat_segments = [x for own in segments for x in sorted(own, key=lambda s: s[1])]
        flat_tiles = [x for own in tiles for x in sorted(own, key=lambda t: (t[1], t[3]))]
        segment_table = np.asarray(flat_segments).reshape(-1, 3).T
        tile_table = np.asarray(flat_tiles).reshape(-1, 5).T
        columns: dict[str, Any] = dict(
            zip(("segment_rank", "segment_start", "segment_end"), segment_table, strict=True)
        )
        columns |= dict(zip(_TILE_COLUMNS, tile_table, strict=True))
        return cls(
            lengths=np.asarray(lengths),
            homes=np.asarray(homes),
            segment_offsets=np.cumsum([0, *map(len, segments)], dtype=np.int64),
            tile_offsets=np.cumsum([0, *map(len, tiles)], dtype=np.int64),
            **columns,
            **scalars,
        )

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Read a plan file."""
        return cls.from_dict(read_object(path, "a plan file"))

    def places(self, lengths: Lengths) -> bool:
        """Whether this is a plan for exactly these lengths."""
        return (
            self.world_size == lengths.num_ranks
            and np.array_equal(self.lengths, lengths.tokens)
            and np.array_equal(self.homes, lengths.homes)
        )

    def __eq__(self, other: object) -> bool:
        return self.digest() == other.digest() if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        return (
            f"Plan({self.planner!r}, {self.num_sequences} sequences on {self.world_size} ranks, "
            f"{int(self.is_split.sum())} split, {self.num_heads} heads)"
        )

    def _segment_columns(self) -> tuple[Array, ...]:
        return tuple(getattr(self, name) for name in _SEGMENT_COLUMNS)

    def _tile_columns(self) -> tuple[Array, ...]:
        return tuple(getattr(self, name) for name in _TILE_COLUMNS)


_SEGMENT_COLUMNS = ("segment_rank", "segment_start", "segment_end")
_TILE_COLUMNS = ("tile_rank", "tile_head_start", "tile_head_end", "tile_query_start", "tile_query_end")


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise PlanError(f"{name} must be integers of at least 0, got {value!r}")
    return int(value)


def _check_sizes(plan: Plan) -> None:
    if not isinstance(plan.planner, str) or not plan.planner.isprintable():
        raise PlanError(f"a planner's name is a line of text, got {plan.planner!r}")
    if not isinstance(plan.reason, str) or not plan.reason.isprintable():
        raise PlanError(f"a plan's reason is a line of text, got {plan.reason!r}")
    if plan.world_size > MAX_RANKS or plan.num_heads > MAX_HEADS:
        sizes = f"{plan.world_size} and {plan.num_heads}"
        raise PlanError(f"a plan may have {MAX_RANKS} ranks and {MAX_HEADS} heads at most, got {sizes}")
    if plan.world_size < 1 or plan.num_heads < 1 or plan.num_kv_heads < 1 or plan.num_heads % plan.num_kv_heads:
        raise PlanError(
            "a plan needs at least one rank and heads that its key-value heads divide, got "
            f"{plan.world_size} ranks, {plan.num_heads} heads, {plan.num_kv_heads} key-value heads"
        )


def _read_lanes(num_lanes: Any, lane: list[Any]) -> Array:
    """The column of lanes of a plan file."""
    if num_lanes not in (1, 2) or isinstance(num_lanes, bool):
        raise PlanError(f"a plan has 1 or 2 lanes, got {num_lanes!r}")
    if num_lanes == 2:
        return np.asarray(lane)
    if any(lane):
        raise PlanError("a plan of one lane has no sequence in another")
    return _one_lane()


def _check(plan: Plan) -> None:
    _check_sizes(plan)
    if len(plan.lane) and (len(plan.lane) != plan.num_sequences or ((plan.lane < 0) | (plan.lane > 1)).any()):
        raise PlanError(f"two lanes need 0 or 1 for each of {plan.num_sequences} sequences, got {plan.lane.tolist()}")
    if len(plan.lengths) and not 0 <= plan.lengths.min() <= plan.lengths.max() <= MAX_LENGTH_TOKENS:
        raise PlanError(f"lengths must be in 0..{MAX_LENGTH_TOKENS}, got {plan.lengths.min()}..{plan.lengths.max()}")
    if len(plan.homes) != plan.num_sequences:
        raise PlanError(f"a plan of {plan.num_sequences} sequences needs as many homes, got {len(plan.homes)}")
    if len(plan.max_tokens_per_rank) not in (0, plan.world_size):
        raise PlanError(f"a plan for {plan.world_size} ranks needs as many caps, got {len(plan.max_tokens_per_rank)}")
    if (np.diff(plan.homes) < 0).any() or ((plan.homes < 0) | (plan.homes >= plan.world_size)).any():
        raise PlanError(f"home ranks must rise within 0..{plan.world_size - 1}")
    for name, ranks, offsets in (
        ("segment", plan.segment_rank, plan.segment_offsets),
        ("tile", plan.tile_rank, plan.tile_offsets),
    ):
        fit = len(offsets) == plan.num_sequences + 1 and offsets[0] == 0 and offsets[-1] == len(ranks)
        if not fit or (np.diff(offsets) < 0).any():
            raise PlanError(f"{name} offsets do not fit {plan.num_sequences} sequences and {len(ranks)} {name}s")
        wrong = np.flatnonzero((ranks < 0) | (ranks >= plan.world_size))
        if len(wrong):
            raise PlanError(f"{name} on rank {ranks[wrong[0]]}, but the plan has {plan.world_size} ranks")
    for columns in (plan._segment_columns(), plan._tile_columns()):
        if len({len(column) for column in columns}) > 1:
            raise PlanError(f"columns of one kind must be equally long, got {[len(column) for column in columns]}")
    check_cover("tokens", plan.segment_offsets, plan.segment_start, plan.segment_end, plan.lengths)
    _check_tiles(plan)
    tokens = plan.rank_tokens.tolist()
    for rank, cap in enumerate(plan.max_tokens_per_rank):
        if tokens[rank] > cap:
            raise PlanError(f"rank {rank} holds {tokens[rank]} tokens, its cap is {cap}")


def _check_tiles(plan: Plan) -> None:
    lengths = plan.lengths[plan.tile_sequence]
    partial = (plan.tile_query_start != 0) | (plan.tile_query_end != lengths)
    if not partial.any():
        heads = np.where(plan.lengths > 0, plan.num_heads, 0)
        check_cover("heads", plan.tile_offsets, plan.tile_head_start, plan.tile_head_end, heads)
        return
    some = np.unique(plan.tile_sequence[partial])
    for i in some.tolist():
        check_query_tiles(plan.placement(i), plan.num_heads)
    others = np.setdiff1d(np.arange(plan.num_sequences), some)
    kept = np.isin(plan.tile_sequence, others)
    counts = np.diff(plan.tile_offsets)[others]
    heads = np.where(plan.lengths[others] > 0, plan.num_heads, 0)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    check_cover("heads", offsets, plan.tile_head_start[kept], plan.tile_head_end[kept], heads)
