"""Plans as text: a grid with one row per rank, for people, that parses back to the same plan.

    plan moldable world=4 heads=24 kv=24
    home 0 | 5000
    home 1 | 1200 800
    rank 0 | 0[0:3100]{0:15}
    rank 1 | 0[3100:5000]{15:24} 1
    rank 2 | 2

A bare id is a whole sequence. ``[start:end]`` are the tokens that the rank holds, ``{heads}`` the heads that it
computes and ``{heads@queries}`` only those rows of the queries. Homes and ranks without sequences have an empty row.
A plan of two lanes says ``lanes=2``, and ``800/1`` is a sequence of 800 tokens in lane 1.
"""

from __future__ import annotations

import re

import numpy as np

from knapformer.errors import PlanError
from knapformer.given.lengths import MAX_RANKS
from knapformer.plans.plan import Plan

_HEADER = re.compile(r"plan (.*?) world=(\d+) heads=(\d+) kv=(\d+)(?: offset=(\d+))?(?: cap=([\d,]+))?( lanes=2)?")
_ROW = re.compile(r"(home|rank) (\d+) \|(.*)")
_CELL = re.compile(r"(\d+)((?:\[\d+:\d+\]|\{\d+:\d+(?:@\d+:\d+)?\})*)")
_PART = re.compile(r"\[(\d+):(\d+)\]|\{(\d+):(\d+)(?:@(\d+):(\d+))?\}")


def format_plan(plan: Plan) -> str:
    """The rank grid of ``plan``."""
    header = f"plan {plan.planner} world={plan.world_size} heads={plan.num_heads} kv={plan.num_kv_heads}"
    if plan.group_offset:
        header += f" offset={plan.group_offset}"
    if plan.max_tokens_per_rank:
        header += " cap=" + ",".join(map(str, plan.max_tokens_per_rank))
    if plan.num_lanes > 1:
        header += " lanes=2"
    homes: list[list[str]] = [[] for _ in range(plan.world_size)]
    cells: list[dict[int, str]] = [{} for _ in range(plan.world_size)]
    for i, split in enumerate(plan.is_split.tolist()):
        place = plan.placement(i)
        homes[place.home].append(f"{place.length}/1" if place.lane else str(place.length))
        if not split:
            for segment in place.segments:
                cells[segment.rank][i] = str(i)
            continue
        for rank, start, end in place.segments:
            cells[rank][i] = cells[rank].get(i, str(i)) + f"[{start}:{end}]"
        for tile in place.tiles:
            queries = f"@{tile.query_start}:{tile.query_end}"
            heads = f"{{{tile.head_start}:{tile.head_end}{'' if queries == f'@0:{place.length}' else queries}}}"
            cells[tile.rank][i] = cells[tile.rank].get(i, str(i)) + heads
    home_rows = [" ".join([f"home {r} |", *own]) for r, own in enumerate(homes)]
    rank_rows = [" ".join([f"rank {r} |", *own.values()]) for r, own in enumerate(cells)]
    return "\n".join([header, *home_rows, *rank_rows])


def parse_plan(text: str) -> Plan:
    """The plan of a rank grid.

    Raises:
        PlanError: a line that is not of the form, or placements that are no plan.
    """
    header, *lines = text.strip().splitlines() or [""]
    match = _HEADER.fullmatch(header.strip())
    if match is None:
        raise PlanError(f"expected a line 'plan NAME world=N heads=H kv=H', got {header!r}")
    try:
        return _parse_rows(match, lines)
    except PlanError:
        raise
    except (ValueError, OverflowError) as error:
        raise PlanError(f"a number that is none, or too long: {error}") from None


def _parse_rows(match: re.Match[str], lines: list[str]) -> Plan:
    planner, world, heads, kv, offset, cap, lanes = match.groups()
    if int(world) > MAX_RANKS:
        raise PlanError(f"a plan may have {MAX_RANKS} ranks at most, got {world}")
    rows: dict[tuple[str, int], list[str]] = {}
    for line in lines:
        row = _ROW.fullmatch(line.strip())
        if row is None:
            raise PlanError(f"expected a line 'home R | …' or 'rank R | …', got {line!r}")
        key = row[1], int(row[2])
        if key in rows or key[1] >= int(world):
            raise PlanError(f"each of ranks 0..{int(world) - 1} has one line of each kind, got {line!r}")
        rows[key] = row[3].split()
    home_rows = [(r, *cell.partition("/")) for r in range(int(world)) for cell in rows.get(("home", r), ())]
    lengths = [int(length) for _, length, _, _ in home_rows]
    lane = [int(number) if slash else 0 for _, _, slash, number in home_rows]
    if any(lane) and not lanes:
        raise PlanError("a sequence in lane 1 needs lanes=2 in the first line")
    segments: list[list[tuple[int, int, int]]] = [[] for _ in lengths]
    tiles: list[list[tuple[int, int, int, int, int]]] = [[] for _ in lengths]
    for rank in range(int(world)):
        for cell in rows.get(("rank", rank), ()):
            _parse_cell(cell, rank, int(heads), lengths, segments, tiles)
    return Plan.from_placements(
        lengths=lengths,
        homes=[r for r, *_ in home_rows],
        segments=segments,
        tiles=tiles,
        world_size=int(world),
        num_heads=int(heads),
        num_kv_heads=int(kv),
        planner=planner,
        group_offset=int(offset or 0),
        max_tokens_per_rank=tuple(map(int, cap.split(","))) if cap else (),
        lane=np.asarray(lane if lanes else [], np.int8),
    )


def _parse_cell(
    cell: str,
    rank: int,
    num_heads: int,
    lengths: list[int],
    segments: list[list[tuple[int, int, int]]],
    tiles: list[list[tuple[int, int, int, int, int]]],
) -> None:
    match = _CELL.fullmatch(cell)
    if match is None or int(match[1]) >= len(lengths):
        raise PlanError(f"rank {rank}: expected an id below {len(lengths)} with [tokens] and {{heads}}, got {cell!r}")
    i = int(match[1])
    if not match[2]:
        segments[i].append((rank, 0, lengths[i]))
        tiles[i].append((rank, 0, num_heads, 0, lengths[i]))
    for start, end, head_start, head_end, query_start, query_end in _PART.findall(match[2]):
        if start:
            segments[i].append((rank, int(start), int(end)))
        else:
            tiles[i].append((rank, int(head_start), int(head_end), int(query_start or 0), int(query_end or lengths[i])))
