"""The comparison of planners, and the baselines that it is made with."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest

from knapformer.cli import main
from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths
from knapformer.plans.planners import evaluate, make_plan
from knapformer.plans.simpler import cp_sat, even_plan, karmarkar_karp, power_of_two
from knapformer.predict.planner_table import Scenario, bench_planners, planner_table

LINEAR = CostModel(gamma=0.0)


def test_karmarkar_karp_beats_greedy_on_its_textbook_case() -> None:
    lengths = Lengths.from_ranks([[8, 7, 6, 5, 4], []])
    plan = karmarkar_karp(lengths, LINEAR)
    assert sorted(plan.rank_tokens.tolist()) == [14, 16]
    assert not plan.is_split.any()


def test_power_of_two_splits_what_exceeds_the_mean() -> None:
    lengths = Lengths.from_ranks([[9000, 100], [100], [100], [100]])
    plan = power_of_two(lengths, LINEAR)
    assert plan.placement(0).ranks == (0, 1, 2, 3)
    assert [len(plan.placement(i).ranks) for i in range(1, 5)] == [1, 1, 1, 1]


def test_baselines_place_steps_that_are_nearly_empty() -> None:
    for rows in ([[]], [[0], [1]], [[], [3, 0]]):
        for planner in (karmarkar_karp, power_of_two):
            assert planner(Lengths.from_ranks(rows), CostModel()).num_sequences == sum(map(len, rows))


def test_cp_sat_is_no_worse_than_power_of_two_by_its_own_measure() -> None:
    if importlib.util.find_spec("ortools") is None:
        with pytest.raises(ConfigurationError, match="pip install ortools"):
            cp_sat(Lengths.from_ranks([[5], [5]]), CostModel())
        return
    rng = random.Random(5)
    lengths = Lengths.from_ranks([[rng.randint(100, 9000) for _ in range(3)] for _ in range(4)])
    summed = [
        (found.rank_busy_s + found.rank_communication_s).max()
        for found in (evaluate(cp_sat(lengths, CostModel(), 5.0)), evaluate(power_of_two(lengths, CostModel())))
    ]
    assert summed[0] <= summed[1] * 1.0001


def test_even_plans_are_those_of_one_bag() -> None:
    lengths = Lengths.from_ranks([[1000, 7], []])
    even = even_plan(lengths, CostModel(), [(0, 2), (0, 2)], "bags")  # type: ignore[list-item]
    bag = make_plan(lengths, planner="bags", topology="g2n1")
    assert even.to_dict() == bag.to_dict()


def test_rows_rank_the_planners() -> None:
    rows = list(bench_planners([Scenario("wan:8:125000:{share}", cost=CostModel(1536, 12))], range(60, 63)))
    by_name = {row.planner: row for row in rows}
    assert {"home", "whole", "ulysses", "karmarkar-karp", "power-of-two", "best bags of each step"} <= by_name.keys()
    free = by_name["moldable, no cap"]
    assert free.over_lower_bound == min(row.over_lower_bound for row in rows)
    assert by_name["home"].gbytes == 0 < free.gbytes
    assert by_name["moldable"].tokens_over_mean <= 1.5001
    table = planner_table(rows)
    assert len(table.splitlines()) == len(rows) + 2
    assert f"**{free.over_lower_bound:.4f}**" in table


def test_the_command_prints_a_table_and_writes_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    assert main(["bench-planners", "--only", "default", "--seeds", "3", "-o", str(target)]) == 0
    assert "| default-8 | 8 | 24 | moldable |" in capsys.readouterr().out
    content = json.loads(target.read_text())
    assert {row["planner"] for row in content["rows"]} >= {"home", "moldable", "karmarkar-karp"}
    for arguments in (["--only", "nothing"], ["--seeds", "5-3"], ["--seeds", "x"]):
        assert main(["bench-planners", *arguments]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
