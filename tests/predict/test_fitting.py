"""Memory marks: what does not fit is found, and each remedy that is named makes it fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from knapformer.given.lengths import Lengths
from knapformer.given.shapes import model_shape
from knapformer.plans.planners import make_plan
from knapformer.plans.registry import PlannerSpec
from knapformer.predict.fitting import fitting_lines, fitting_row, peak_memory_bytes, peak_text
from knapformer.predict.hardware import hardware
from knapformer.predict.memory import MemoryModel
from knapformer.predict.words import than

SHAPE = model_shape("flux.1-dev")
COST = hardware("h100").cost(SHAPE)


def row_of(lengths: list[list[int]], planner: str, memory: MemoryModel, memory_bytes: float) -> dict[str, Any]:
    steps = [Lengths.from_ranks(lengths), Lengths.from_ranks([[64]] * len(lengths))]
    plans = [make_plan(step, planner=planner, cost=COST, max_tokens_per_rank=None) for step in steps]
    return fitting_row(plans, steps, PlannerSpec(planner), COST, memory, memory_bytes)


def memory_of(shard_size: int, recompute: Any = "block") -> MemoryModel:
    return MemoryModel.of_model("flux.1-dev", SHAPE, shard_size=shard_size, recompute=recompute)


def test_each_remedy_makes_the_step_fit() -> None:
    lengths = [[40_000, 40_000], [200], [200], [200], [200], [200], [200], [200]]
    memory = memory_of(4, "none")
    largest = row_of(lengths, "home", memory, 1e15)["peak_memory_gigabytes"]
    room = 0.9e9 * largest
    row = row_of(lengths, "home", memory, room)
    assert row["steps_over_memory"] == 1 and row["would_fit"]["max_tokens_per_rank"] is None, "home keeps no caps"
    for remedy, changed in (("shard_size", memory), ("recompute", memory)):
        value = row["would_fit"][remedy]
        if value is not None:
            new = replace(changed, **{remedy: "block" if remedy == "recompute" else value})
            assert row_of(lengths, "home", new, room)["steps_over_memory"] == 0
    assert row["would_fit"]["recompute"] is True
    step = Lengths.from_ranks(lengths)
    whole = row_of(lengths, "whole", memory, 0.7 * room)
    if whole["steps_over_memory"]:
        cap = whole["would_fit"]["max_tokens_per_rank"]
        assert cap is None or peak_memory_bytes(
            make_plan(step, planner="whole", cost=COST, max_tokens_per_rank=cap), memory
        ) <= (0.7 * room)


def test_a_cap_and_more_ranks_are_found_and_checked_by_planning() -> None:
    lengths = [[30_000, 30_000, 500, 900], [400], [300], [200]]
    memory = memory_of(4)
    step = Lengths.from_ranks(lengths)
    uncapped = make_plan(step, planner="moldable", cost=COST, max_tokens_per_rank=None)
    level = peak_memory_bytes(uncapped, memory)
    least = min(
        peak_memory_bytes(make_plan(step, planner="moldable", cost=COST, max_tokens_per_rank=cap), memory)
        for cap in (15_600, 16_000, 17_000)
    )
    row = row_of(lengths, "moldable", memory, (least + 2e9) if least + 2e9 < level else 0.97 * level)
    would = row["would_fit"]
    assert row["steps_over_memory"] == 1
    room = 1e9 * row["memory_gigabytes"]
    if would["max_tokens_per_rank"] is not None:
        cap = would["max_tokens_per_rank"]
        plan = make_plan(step, planner="moldable", cost=COST, max_tokens_per_rank=cap)
        assert peak_memory_bytes(plan, memory) <= room
    assert would["ranks"] is not None and would["ranks"] > 4 and would["ranks"] % 4 == 0
    wider = Lengths.from_ranks([*lengths, *[[]] * (would["ranks"] - 4)])
    fits = memory.tokens_that_fit(room)
    plan = make_plan(wider, planner="moldable", cost=COST, max_tokens_per_rank=fits)
    assert peak_memory_bytes(plan, memory) <= room


def test_what_fits_has_no_mark_and_what_is_not_known_a_question_mark() -> None:
    row = row_of([[100], [200]], "home", memory_of(2), 200e9)
    assert row["steps_over_memory"] == 0 and row["would_fit"] is None and ">" not in peak_text(row)
    assert list(fitting_lines({"home": row})) == []
    unknown = fitting_row([], [], PlannerSpec("home"), COST, None, 80e9)
    assert peak_text(unknown) == "?" and list(fitting_lines({"home": unknown})) == []


def test_lines_name_what_would_help_and_say_where_nothing_does() -> None:
    nothing: dict[str, Any] = {
        "peak_memory_gigabytes": 160.6,
        "memory_gigabytes": 80.0,
        "steps_over_memory": 1,
        "would_fit": dict.fromkeys(("max_tokens_per_rank", "shard_size", "recompute", "ranks")),
    }
    capped = nothing | {"would_fit": nothing["would_fit"] | {"max_tokens_per_rank": 12345, "ranks": 16}}
    lines = list(fitting_lines({"home": nothing, "whole": capped, "moldable": capped}))
    assert lines == [
        "home (160.6 GB) does not fit the 80 GB of a rank. No single change would: load fewer tokens.",
        "whole (160.6 GB), moldable (160.6 GB) do not fit the 80 GB of a rank. What would: a cap of 12,345 tokens a "
        "rank; or the same sequences on 16 ranks.",
    ]
    assert peak_text(nothing) == "160.6 > 80"


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (1.386, "1.39 × faster than home"),
        (0.72, "1.39 × slower than home"),
        (1.0, "as fast as home"),
        (0.9951, "as fast as home"),
        (0.99, "1.01 × slower than home"),
        (1 / 3, "3.00 × slower than home"),
    ],
)
def test_ratios_in_words(ratio: float, words: str) -> None:
    assert than(ratio, "home") == words
