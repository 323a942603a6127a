"""A plan as a table for people: what each rank holds, and a bar of how busy that makes it.

``plan_format`` prints the same plan so that it parses back; this one is for reading.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table
from rich.text import Text

from knapformer.plans.plan import Placement, Plan

if TYPE_CHECKING:
    from knapformer.plans.planners import Evaluation

BAR_WIDTH = 24
GRID_LEGEND = (
    "sequences: #id [tokens]{heads} or {heads@query rows} of a split one; n×length: n whole ones of that length"
)
_PARTS = (("rank_linear_s", "█", "green"), ("rank_attention_s", "▓", "blue"), ("rank_communication_s", "░", "red"))


def plan_table(plan: Plan, evaluation: Evaluation, *, max_rows: int = 32, width: int = 120) -> Table:
    """A row per rank: tokens, load over the mean, a bar of linear, attention and communication time, sequences.

    Args:
        plan: of any size; beyond ``max_rows`` ranks only the busiest and the idlest are shown, in rank order.
        evaluation: of ``plan``.
        max_rows: rows for ranks.
        width: characters of a row.

    Returns:
        A Rich table. Split sequences come first, as ``#id [tokens]{heads}``, counted where parts are alike; then whole
        ones, counted by length.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for name, least in (("rank", 4), ("tokens", 7), ("load", 5)):
        table.add_column(name, justify="right", min_width=least, no_wrap=True)
    table.add_column("█ linear ▓ attn ░ exch.", min_width=BAR_WIDTH, no_wrap=True)
    left = max(16, width - sum(column.min_width or 0 for column in table.columns) - 2 * len(table.columns))
    table.add_column("sequences", max_width=left, no_wrap=True, overflow="ellipsis")
    load = np.asarray(evaluation.rank_linear_s) + np.asarray(evaluation.rank_attention_s)
    busy = load + np.asarray(evaluation.rank_communication_s)
    full_s = max(float(busy.max()), evaluation.makespan_s)
    held = _sequences_of_ranks(plan)
    shown = _ranks_shown(busy, max_rows)
    previous = -1
    for rank in shown:
        if rank > previous + 1:
            table.add_row("…", "", "", Text(f"{rank - previous - 1} more ranks", style="dim"), "")
        previous = rank
        over_mean = float(load[rank] / load.mean()) if load.any() else 1.0
        bar = _bar(evaluation, rank, full_s)
        table.add_row(str(rank), f"{int(plan.rank_tokens[rank]):,}", f"{over_mean:.3f}", bar, held[rank])
    if previous < plan.world_size - 1:
        table.add_row("…", "", "", Text(f"{plan.world_size - 1 - previous} more ranks", style="dim"), "")
    return table


def _ranks_shown(busy: np.ndarray, max_rows: int) -> list[int]:
    if len(busy) <= max_rows:
        return list(range(len(busy)))
    order = np.argsort(-busy, kind="stable")
    num_idlest = max_rows // 4
    return sorted([*order[: max_rows - num_idlest].tolist(), *order[len(order) - num_idlest :].tolist()])


def _bar(evaluation: Evaluation, rank: int, full_s: float) -> Text:
    bar, done_s, cells = Text(), 0.0, 0
    for name, block, style in _PARTS:
        done_s += float(getattr(evaluation, name)[rank])
        end = round(BAR_WIDTH * done_s / full_s) if full_s else 0
        bar.append(block * (end - cells), style=style)
        cells = end
    bar.append("·" * (BAR_WIDTH - cells), style="dim")
    return bar


def _sequences_of_ranks(plan: Plan) -> list[Text]:
    """What each rank holds, split sequences first."""
    is_split = plan.is_split
    whole: list[Counter[str]] = [Counter() for _ in range(plan.world_size)]
    for i in np.flatnonzero(~is_split & (plan.lengths > 0)).tolist():
        whole[int(plan.segment_rank[plan.segment_offsets[i]])][str(plan.lengths[i])] += 1
    parts: list[dict[str, list[int]]] = [{} for _ in range(plan.world_size)]
    for i in np.flatnonzero(is_split).tolist():
        placement = plan.placement(i)
        for rank in placement.ranks:
            parts[rank].setdefault(_part(placement, rank), []).append(i)
    texts = []
    for rank in range(plan.world_size):
        split = [f"#{ids[0]} {part}" if len(ids) == 1 else f"{len(ids)}×{part}" for part, ids in parts[rank].items()]
        text = Text("  ".join(split), style="yellow")
        text.append("  " if split and whole[rank] else "")
        counted = [f"{count}×{length}" if count > 1 else length for length, count in whole[rank].items()]
        texts.append(text.append(" ".join(counted), style="default"))
    return texts


def _part(placement: Placement, rank: int) -> str:
    """``[tokens]{heads}`` of one rank's part, ``{heads@queries}`` where a tile has part of the queries."""
    tokens = "".join(f"[{s.start}:{s.end}]" for s in placement.segments if s.rank == rank)
    heads = "".join(
        f"{{{t.head_start}:{t.head_end}"
        + ("}" if t.query_end - t.query_start == placement.length else f"@{t.query_start}:{t.query_end}}}")
        for t in placement.tiles
        if t.rank == rank
    )
    return (tokens or "[]") + (heads or "{}")
