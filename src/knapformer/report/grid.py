"""A plan as a table for people: what each rank holds, and a bar of how busy that makes it.

``plan_format`` prints the same plan so that it parses back; this one is for reading.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table
from rich.text import Text

from knapformer.plan import Plan

if TYPE_CHECKING:
    from knapformer.planners import Evaluation

BAR_WIDTH = 24
_PARTS = (("rank_linear_s", "█", "green"), ("rank_attention_s", "▓", "blue"), ("rank_communication_s", "░", "red"))


def plan_table(plan: Plan, evaluation: Evaluation, *, max_rows: int = 32) -> Table:
    """A row per rank: tokens, load over the mean, a bar of linear, attention and communication time, sequences.

    Args:
        plan: of any size; beyond ``max_rows`` ranks only the busiest and the idlest are shown, in rank order.
        evaluation: of ``plan``.
        max_rows: rows for ranks.

    Returns:
        A Rich table. Split sequences come first, as ``#id length tokens heads``; whole ones are counted by length.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for name in ("rank", "tokens", "load"):
        table.add_column(name, justify="right")
    legend = "█ linear ▓ attention ░ exchange"
    table.add_column(legend)
    table.add_column("sequences", no_wrap=True, overflow="ellipsis")
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
    num_idlest = max_rows // 3
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
    whole = np.flatnonzero(~is_split & (plan.lengths > 0))
    counts: list[Counter[int]] = [Counter() for _ in range(plan.world_size)]
    for i in whole.tolist():
        counts[int(plan.segment_rank[plan.segment_offsets[i]])][int(plan.lengths[i])] += 1
    texts = [Text() for _ in range(plan.world_size)]
    for i in np.flatnonzero(is_split).tolist():
        placement = plan.placement(i)
        for rank in placement.ranks:
            tokens = " ".join(f"[{s.start}:{s.end}]" for s in placement.segments if s.rank == rank) or "[]"
            heads = [t for t in placement.tiles if t.rank == rank]
            part = " ".join(
                f"{{{t.head_start}:{t.head_end}"
                + ("" if t.query_end - t.query_start == placement.length else f"@{t.query_start}:{t.query_end}")
                + "}"
                for t in heads
            )
            texts[rank].append(f"#{i} {tokens}{part or '{}'}  ", style="bold yellow")
    for rank, count in enumerate(counts):
        texts[rank].append(" ".join(f"{n}×{length}" if n > 1 else str(length) for length, n in count.items()))
    return texts
