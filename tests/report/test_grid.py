"""The rank grid: what each rank holds, cut to a sensible size."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from knapformer.given.cost import CostModel
from knapformer.plans.planners import evaluate, make_plan
from knapformer.report.grid import BAR_WIDTH, plan_table


def lines(lengths, planner: str, *, width: int = 140, max_rows: int = 32, **options) -> list[str]:
    cost = CostModel()
    plan = make_plan(lengths, planner=planner, cost=cost, **options)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(plan_table(plan, evaluate(plan, cost), width=width, max_rows=max_rows))
    return console.export_text().splitlines()[1:]


def test_whole_sequences_are_counted_by_length():
    rows = lines([[500, 500, 300], [], [7]], "home")
    assert [row.split()[:2] for row in rows] == [["0", "1,300"], ["1", "0"], ["2", "7"]]
    assert rows[0].rstrip().endswith("2×500 300")
    assert rows[1].rstrip().endswith("·" * BAR_WIDTH)


def test_split_sequences_show_their_parts():
    rows = lines([[48_000], [100]], "bags", topology="g2n1")
    assert "#0 [0:24000]{0:12}  #1 [0:50]{0:12}" in rows[0]
    assert "#0 [24000:48000]{12:24}  #1 [50:100]{12:24}" in rows[1]
    assert "2×[0:300]{0:12}" in lines([[600], [600]], "bags", topology="g2n1")[0]


def test_the_longest_bar_is_full_and_others_are_in_proportion():
    rows = lines([[40_000], [20_000]], "home")
    filled = [sum(row.count(block) for block in "█▓░") for row in rows]
    work = CostModel().work_s([40_000, 20_000])
    assert filled == [BAR_WIDTH, round(BAR_WIDTH * work[1] / work[0])]


def test_many_ranks_show_the_busiest_and_the_idlest():
    lengths = [[100 + rank] for rank in np.random.default_rng(0).permutation(1000).tolist()]
    rows = lines(lengths, "home", max_rows=12)
    shown = [int(row.split()[1].replace(",", "")) for row in rows if not row.lstrip().startswith("…")]
    assert len(shown) == 12 and {1099, 1098, 100, 101} <= set(shown)
    hidden = sum(int(row.split()[1]) for row in rows if row.lstrip().startswith("…"))
    assert hidden + 12 == 1000


@pytest.mark.parametrize("width", [60, 80, 200])
def test_rows_keep_to_the_width(width):
    rows = lines([[1000] * 60, [900] * 3], "bags", topology="g2n1", width=width)
    assert all(len(row) <= width for row in rows)
    assert all(row.split()[:3] == [str(rank), "31,350", "1.000"] for rank, row in enumerate(rows))
