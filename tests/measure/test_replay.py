"""Calibrating to packs and replaying plans, on the CPU."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from knapformer.cli import main
from knapformer.demo.config import TrainConfig, default_planners
from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.given.shapes import DEMO_HEAD_WIDTH, DEMO_HEADS
from knapformer.measure.calibrate_model import NUM_FITTED, NUM_HELD_OUT, calibrate_model, find_longest, make_packs
from knapformer.measure.replay import rank_share, replay
from knapformer.measure.runner import ModelRunner, Stopwatch, seconds_of
from knapformer.models.presets import make_config
from knapformer.plans.planners import make_plan

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    torch.set_num_threads(1)
    return ModelRunner.of_model("demo", dtype=torch.float32, device=CPU, recompute=False)


def test_packs_mix_short_and_long_and_none_is_tested_that_was_fitted() -> None:
    fitted, tested = make_packs(4096)
    assert len(fitted) == NUM_FITTED and len(tested) == NUM_HELD_OUT
    assert not set(fitted) & set(tested)
    assert max(map(max, fitted)) == 4096 and min(map(min, fitted)) == 128
    assert all(sum(pack) <= 4096 for pack in (*fitted, *tested))
    with pytest.raises(ConfigurationError, match="needs packs of 512 tokens, got 300"):
        make_packs(300)


def test_calibration_recovers_a_known_cost(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """With times made from the formula and 1 % of noise, the fit finds the formula and predicts the packs left out."""
    rng = random.Random(0)
    ran: list[list[int]] = []
    monkeypatch.setattr(runner, "train", lambda pack, attention=None: ran.append(list(pack)))

    def fake_seconds(run: object, device: torch.device) -> float:
        run()  # type: ignore[operator]
        pack = ran[-1]
        exact = 1e-3 + 2e-6 * sum(pack) + 3e-9 * sum(n * n for n in pack)
        return exact * rng.uniform(0.99, 1.01)

    monkeypatch.setattr("knapformer.measure.runner.seconds_of", fake_seconds)
    found = calibrate_model(runner, longest_tokens=8192, repeats=5)
    assert found.fit.s_per_token == pytest.approx(2e-6, rel=0.02)
    assert found.fit.s_per_pair == pytest.approx(3e-9, rel=0.02)
    assert 0 < found.held_out_mape < 0.01
    assert found.cost.linear_s_per_token * 2 * 3 == pytest.approx(2e-6, rel=0.02)
    assert found.cost.attention_s([1]).item() * 2 * 3 == pytest.approx(3e-9, rel=0.02)
    monkeypatch.setattr("knapformer.measure.calibrate_model.seconds_of", fake_seconds)
    with pytest.raises(ConfigurationError, match=r"a pass over 512 tokens takes longer than 1e-09 s; raise --budget"):
        find_longest(runner, 1e-9)


@pytest.mark.parametrize("planner", ["home", "ulysses", "moldable"])
def test_every_rank_of_a_plan_runs_and_backward_reaches_q_k_and_v(runner: ModelRunner, planner: str) -> None:
    """Also a rank without tokens that has tiles, and a step with an empty rank."""
    plan = make_plan([[700, 30], [], [20, 0], [64]], planner=planner, cost=runner.template, max_tokens_per_rank=None)
    for rank in range(4):
        rank_share(plan, rank, runner)()


def test_a_share_of_whole_sequences_computes_what_training_does(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan([[40, 30], [20]], planner="home", cost=runner.template)
    outputs = []

    def forward(*args: object, **kwargs: object) -> torch.Tensor:
        outputs.append(original(*args, **kwargs))
        return outputs[-1]

    original = runner.model.forward
    monkeypatch.setattr(runner.model, "forward", forward)
    rank_share(plan, 0, runner)()
    runner.train([40, 30])
    runner.train([70])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])


def test_replay_ranks_the_loads_and_a_wrong_cost_shows(runner: ModelRunner) -> None:
    rows = [[900, 700], [64], [64], [64]]
    found = calibrate_model(runner, longest_tokens=1600, repeats=1)
    plans = {
        name: make_plan(rows, planner=name, cost=found.cost, max_tokens_per_rank=None) for name in ("home", "ulysses")
    }
    results = replay(plans, found.cost, runner, t0_s=found.fit.t0_s, reference_s=found.reference_s, repeats=1)
    home, ulysses = results["home"], results["ulysses"]
    assert home["measured_s"][0] > 2 * home["measured_s"][1]
    assert home["measured_discrepancy"] > 0.5 > ulysses["measured_discrepancy"]
    assert home["mape"] < 0.5
    wrong = replay(
        {"home": plans["home"]}, replace(found.cost, flops_per_s=found.cost.flops_per_s / 16), runner, repeats=1
    )
    assert wrong["home"]["mape"] > 1.0
    with pytest.raises(ConfigurationError, match=r"must have the same ranks, got \[1, 4\]"):
        replay({**plans, "one": make_plan([[5]], planner="home", cost=found.cost)}, found.cost, runner)


def test_plans_of_other_heads_are_cut_over_the_models(runner: ModelRunner) -> None:
    plan = make_plan([[600], [10]], planner="ulysses", cost=CostModel())
    results = replay({"flux": plan}, runner.template, runner, repeats=1)
    assert len(results["flux"]["measured_s"]) == 2


def test_a_machine_that_slows_down_does_not_show(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of 3 references counts 3 references, however fast the machine is at the moment."""
    monkeypatch.setattr(runner, "train", lambda pack, attention=None: None)
    speeds = iter([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0])

    def fake_seconds(run: object, device: torch.device) -> float:
        return next(speeds) * (3.0 if run is slow else 1.0)

    monkeypatch.setattr("knapformer.measure.runner.seconds_of", fake_seconds)

    def slow() -> None:
        """Never run."""

    watch = Stopwatch(runner)
    units = [watch.units(slow) for _ in range(3)]
    assert units == [3.0, pytest.approx(3.0, rel=0.4), 3.0]
    assert watch.seconds(units) == 3.0 * 1.5
    assert Stopwatch(runner, reference_s=0.5).seconds(units) == 3.0 * 0.5


def test_processor_time_is_counted() -> None:
    assert 0 < seconds_of(lambda: torch.ones(300, 300) @ torch.ones(300, 300), CPU) < 5


def test_the_demos_stand_in_is_the_model_that_the_demo_trains(runner):
    demo = TrainConfig(planners=default_planners(2))
    assert runner.config == make_config(
        num_heads=demo.num_heads,
        head_width=demo.head_width,
        num_double_blocks=demo.num_double_blocks,
        num_single_blocks=demo.num_single_blocks,
    )


def test_commands_calibrate_then_replay_with_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost_file, plan_file, result_file = (tmp_path / name for name in ("cost.json", "a.json", "r.json"))
    options = ["--longest", "512", "--repeats", "1", "--max-mape", "80", "--device", "cpu"]
    assert main(["calibrate", "-o", str(cost_file), *options]) == 0
    assert "held-out MAPE" in capsys.readouterr().out
    content = json.loads(cost_file.read_text())
    assert CostModel.read(cost_file).hidden == DEMO_HEADS * DEMO_HEAD_WIDTH
    assert len(content["measured"]["held_out"]) == NUM_HELD_OUT and content["measured"]["environment"]["torch"]

    (tmp_path / "l.json").write_text('{"lengths": [[300, 20], [20]]}')
    planned = ["plan", str(tmp_path / "l.json"), "--cost", str(cost_file), "-o", str(plan_file), "--json"]
    assert main(planned) == 0
    capsys.readouterr()
    replayed = ["replay", str(plan_file), "--cost", str(cost_file), "--repeats", "1", "-o", str(result_file)]
    assert main([*replayed, "--device", "cpu"]) == 0
    assert "modelled, not measured" in " ".join(capsys.readouterr().out.split())
    assert list(json.loads(result_file.read_text())["plans"]) == ["a"]


def test_a_fit_that_misses_is_not_written_unless_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = iter(range(1, 10_000))
    monkeypatch.setattr("knapformer.measure.runner.seconds_of", lambda run, device: 1.0 + next(noise) * 7 % 5)
    file = tmp_path / "cost.json"
    options = ["calibrate", "--longest", "512", "--repeats", "1", "--device", "cpu", "-o", str(file)]
    with monkeypatch.context() as patch:
        patch.setattr("knapformer.given.cost.Fit.to_cost", lambda self, cost, passes: cost)
        assert main(options) == 2
        assert "no file written" in capsys.readouterr().err and not file.exists()
        assert main([*options, "--force"]) == 0
    assert file.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay"], "give plan files or --workload, one of them"),
        (["replay", "no.json", "--device", "cpu"], "cannot read no.json"),
        (["calibrate", "--model", "bert", "--device", "cpu"], "unknown model 'bert'; known:"),
        (["calibrate", "--dtype", "int8", "--device", "cpu"], "--dtype must be one of float32"),
        (["calibrate", "--links"], "--links needs ranks: torchrun"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
