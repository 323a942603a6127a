"""Training through the bench's own runner: planners differ in who computes, and in nothing else."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("skimage")

from launch import run_ranks

from knapformer.cli import main
from knapformer.demo.config import PlannerSpec, TrainConfig
from knapformer.demo.results import SCHEMA, loss_curve, summarize
from knapformer.demo.train import run_rank
from knapformer.execution.groups import BalancingGroup
from knapformer.given.cost import CostModel
from knapformer.given.shapes import DEMO, named_shape

COST = CostModel(hidden=32, num_heads=4, flops_per_s=1e9, num_layers=2).to_dict()
SMALL = {
    "codes": "g1b1i96f3s0,g1b3i48f1s0",
    "num_heads": 4,
    "head_width": 8,
    "num_double_blocks": 1,
    "num_single_blocks": 1,
    "max_text_tokens": 6,
    "cost": COST,
    "learning_rate": 3e-3,
}


def config(planners: str, **changes) -> TrainConfig:
    return TrainConfig(planners=tuple(map(PlannerSpec.parse, planners.split())), **{**SMALL, **changes})


def train(_rank: int, world_size: int, settings: list[TrainConfig]) -> list[dict]:
    group = BalancingGroup.create()
    return [run_rank(own, group, ranks_per_node=world_size, progress=lambda *_: None) for own in settings]


def results(world_size: int, *settings: TrainConfig) -> list[dict]:
    """The content of each run's results file; every rank gathers the same."""
    ranks = run_ranks(train, world_size, list(settings))
    assert all(json.dumps(other) == json.dumps(ranks[0]) for other in ranks[1:])
    contents = [
        {"schema": SCHEMA, "num_ranks": world_size, "config": own.to_dict(), **raw}
        for own, raw in zip(settings, ranks[0], strict=True)
    ]
    return [{**content, "summary": summarize(content)} for content in contents]


def check_equal_curves(content: dict) -> None:
    for name, row in content["summary"].items():
        assert row["loss_difference"] <= 1e-9, name
        assert row["last_loss"] < row["first_loss"]
    balanced = next(notes for name, notes in content["planners"].items() if name.startswith("bags:g"))
    assert sum(map(sum, balanced["bytes_sent"])) > 0
    assert sum(map(sum, content["planners"]["home"]["bytes_sent"])) == 0


def test_ten_steps_in_float64_have_the_same_loss_curve_on_two_ranks():
    """And the bound is far below what other data or slightly other training would do."""
    ten = {"steps": 10, "dtype": "float64"}
    plain, checkpointed, seed, rate = results(
        2,
        config("home bags:g2n1 ulysses moldable", **ten),
        config("home bags:g2n1", **ten, checkpoint="block", shard_size=1),
        config("home", steps=4, dtype="float64", seed=1),
        config("home", steps=4, dtype="float64", learning_rate=3.001e-3),
    )
    check_equal_curves(plain)
    check_equal_curves(checkpointed)
    curves = [loss_curve(content["planners"]["home"]) for content in (plain, seed, rate)]
    assert abs(curves[0][0] - curves[1][0]) / curves[0][0] > 1e-4
    assert curves[0][0] == curves[2][0] and 1e-8 < abs(curves[0][3] - curves[2][3]) / curves[0][3] < 1e-2


def test_ten_steps_in_float64_have_the_same_loss_curve_on_three_ranks():
    settings = {"steps": 10, "dtype": "float64", "checkpoint": "attention", "overlap": False}
    check_equal_curves(results(3, config("home bags:g1n1+g2n1 bags:g3n1", **settings))[0])


def test_bfloat16_computes_in_it_and_keeps_the_objective_in_float32():
    narrow, wide = results(2, config("home moldable", steps=6, dtype="bfloat16"), config("home", steps=6))
    assert narrow["summary"]["moldable"]["loss_difference"] < 2e-2
    curves = [loss_curve(content["planners"]["home"]) for content in (narrow, wide)]
    assert curves[0][0] == curves[1][0], "the model begins with 0, so this is the mean square of unrounded targets"
    assert 1e-7 < abs(curves[0][-1] - curves[1][-1]) / curves[1][-1] < 2e-2
    assert sum(map(sum, narrow["planners"]["moldable"]["bytes_sent"])) > 0


def test_bench_command(tmp_path, capsys):
    """Calibrates, trains, and leaves a results file, a page and a table."""
    file = tmp_path / "runs" / "bench.json"
    arguments = ["--codes", "g1b1i160f3s0,g1b3i48f1s0", "--planners", "home,bags:g2n1", "--ranks", "2", "--steps", "3"]
    shape = ["--heads", "4", "--head-width", "8", "--double-blocks", "1", "--single-blocks", "1"]
    assert main(["bench", *arguments, *shape, "--warmup-steps", "1", "-o", str(file)]) == 0
    out = capsys.readouterr().out
    assert "bags:g2n1" in out and "held-out error" in out
    content = json.loads(file.read_text())
    assert content["schema"] == SCHEMA and content["environment"]["torch"]
    assert content["calibration"]["cost"]["gamma"] > 0
    assert len(content["planners"]["home"]["step_s"][1]) == 3
    assert content["summary"]["bags:g2n1"]["loss_difference"] < 1e-5
    assert file.with_suffix(".html").stat().st_size > 1e6
    assert main(["report", str(file), "-o", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == file.with_suffix(".html").read_text()


def test_what_a_rank_raises_is_one_line(tmp_path, capfd):
    """The ranks of a process that fails end, and the first one's error is the command's."""
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(CostModel.from_shape(named_shape(DEMO)).with_machine(speeds=(1.0, 1.0, 1.0)).to_dict()))
    arguments = ["--ranks", "2", "--codes", "g1b1i48f1s0", "--planners", "moldable", "--cost", str(cost)]
    assert main(["bench", *arguments, "-o", str(tmp_path / "bench.json")]) == 2
    error = capfd.readouterr().err
    assert error == "knapformer: machine.speeds lists 3 ranks, the balancing group has 2\n"
    assert not (tmp_path / "bench.json").exists()
