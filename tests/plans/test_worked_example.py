"""The worked example of csrc/README.md: its numbers are read from the page and computed anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from knapformer import CostModel, Evaluation, Plan, evaluate, make_plan

PAGE = (Path(__file__).parents[2] / "csrc" / "README.md").read_text().split("## A worked example")[1]
SEQUENCES, RANKS = 3, 4


def table(first_column: str) -> list[list[str]]:
    """The cells of the table whose first column has this title, without titles."""
    lines = PAGE.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def number(pattern: str) -> float:
    """The one number that the page states at ``pattern``'s group."""
    found = re.findall(pattern, PAGE.replace("\n", " "))
    assert len(found) == 1, (pattern, found)
    return float(found[0])


@pytest.fixture
def cost() -> CostModel:
    return CostModel()


@pytest.fixture
def plan(cost: CostModel) -> Plan:
    lengths: list[list[int]] = [[] for _ in range(RANKS)]
    for _, tokens, home, *_ in table("sequence"):
        lengths[int(home)].append(int(tokens))
    return make_plan(lengths, cost=cost)


@pytest.fixture
def found(plan: Plan, cost: CostModel) -> Evaluation:
    return evaluate(plan, cost)


def test_the_sequences_take_what_the_page_says(plan: Plan, cost: CostModel) -> None:
    rows = table("sequence")
    assert len(rows) == SEQUENCES
    for i, (_, tokens, _, linear, attention, work) in enumerate(rows):
        length = plan.lengths[i : i + 1]
        assert int(tokens) == length[0]
        attention_s, work_s = cost.attention_s(length)[0], cost.work_s(length)[0]
        assert [f"{1e3 * x:.3f}" for x in (work_s - attention_s, attention_s, work_s)] == [linear, attention, work]


def test_each_rank_has_what_the_page_says(plan: Plan, found: Evaluation) -> None:
    rows = table("rank")
    assert len(rows) == RANKS
    split = plan.placement(0)
    for rank, (name, tokens, heads, whole, *times) in enumerate(rows):
        assert int(name) == rank
        assert sum(x.end - x.start for x in split.segments if x.rank == rank) == int(tokens)
        tiles = [x for x in split.tiles if x.rank == rank]
        head_rows = sum((x.head_end - x.head_start) * (x.query_end - x.query_start) for x in tiles)
        assert f"{head_rows / split.length:.2f}" == heads
        assert [i for i in (1, 2) if plan.placement(i).ranks == (rank,)] == ([] if whole == "–" else [int(whole)])
        phases = (found.rank_linear_s, found.rank_attention_s, found.rank_communication_s)
        assert [f"{1e3 * phase[rank]:.3f}" for phase in phases] == times


def test_makespan_and_bounds_are_what_the_page_says(found: Evaluation) -> None:
    assert number(r"need at least ([\d.]+) ms each") == round(1e3 * found.lower_bound_s, 3)
    assert number(r"All four ranks meet: [\d. +]+ = ([\d.]+) ms") == round(1e3 * found.makespan_s, 3)
    assert number(r"ms, ([\d.]+) times the lower bound") == round(found.over_lower_bound, 3)
    assert number(r"The tight bound is ([\d.]+) ms") == round(1e3 * found.tight_bound_s, 3)
    parts = re.findall(r"All four ranks meet: ([\d.]+) \+ ([\d.]+) \+ ([\d.]+)", PAGE)[0]
    phases = (found.rank_linear_s, found.rank_attention_s, found.rank_communication_s)
    assert list(parts) == [f"{1e3 * phase.max():.3f}" for phase in phases]


def test_smaller_groups_take_what_the_page_says(plan: Plan, cost: CostModel) -> None:
    work_ms = 1e3 * cost.work_s(plan.lengths)
    assert number(r"two ranks would take ([\d.]+) ms") == round(work_ms[0] / 2, 3)
    assert number(r"both other sequences and take ([\d.]+) ms") == round(work_ms[1] + work_ms[2], 3)


def test_the_levels_are_what_the_page_says(plan: Plan, cost: CostModel) -> None:
    attention_s = cost.attention_s(plan.lengths)
    level_s = attention_s.sum() / RANKS
    assert number(r"32000 / 4 = (\d+) tokens") == plan.lengths.sum() / RANKS
    assert number(r"6\.960 / 4 = ([\d.]+) ms") == round(1e3 * level_s, 3)
    per_head = attention_s[0] / cost.num_heads
    assert number(r"worth ([\d.]+) heads") == round((level_s - attention_s[1]) / per_head, 2)
    assert number(r"and ([\d.]+) heads\. Two rules") == round(level_s / per_head, 2)
    assert number(r"attention takes ([\d.]+) ms\. With shared") == round(1e3 * (attention_s[1] + 5 * per_head), 3)
    assert number(r"That takes ([\d.]+) ms and wins") == round(1e3 * level_s, 3)


def test_as_many_tokens_move_as_the_page_says(found: Evaluation) -> None:
    assert number(r"(\d+) of 32000 tokens move") == found.moved_tokens
