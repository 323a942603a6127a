"""Calibrating to packs and replaying plans, on the CPU."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from knapformer.cli import main
from knapformer.demo.config import TrainConfig, default_planners
from knapformer.errors import ConfigurationError
from knapformer.execution.transport import Channel
from knapformer.given.cost import CostModel
from knapformer.given.shapes import DEMO_HEAD_WIDTH, DEMO_HEADS
from knapformer.measure.calibrate_model import NUM_FITTED, NUM_HELD_OUT, calibrate_model, find_longest, make_packs
from knapformer.measure.replay import ReplayAttention, rank_share, replay
from knapformer.measure.runner import ModelRunner, Stopwatch, seconds_of
from knapformer.models import local_attention
from knapformer.models.presets import make_config
from knapformer.plans.plan import Plan
from knapformer.plans.planners import evaluate, make_plan
from knapformer.schedules.attention import attention_schedule
from knapformer.schedules.tokens import RankTokens

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
def test_every_rank_of_a_plan_runs_and_backward_reaches_q_k_and_v(
    runner: ModelRunner, planner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a rank without tokens that has tiles, and a step with an empty rank."""
    plan = make_plan([[700, 30], [], [20, 0], [64]], planner=planner, cost=runner.template, max_tokens_per_rank=None)
    reached: list[float] = []
    original = ReplayAttention.__call__

    def attend(self: ReplayAttention, *qkv: torch.Tensor, **options: object) -> torch.Tensor:
        for x in qkv:
            x.register_hook(lambda gradient: reached.append(float(gradient.abs().sum())))
        return original(self, *qkv, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ReplayAttention, "__call__", attend)
    num_blocks = runner.config.num_double_blocks + runner.config.num_single_blocks
    for rank, num_tokens in enumerate(plan.rank_tokens):
        reached.clear()
        rank_share(plan, rank, runner)()
        assert len(reached) == 3 * num_blocks
        assert all(size > 0 for size in reached) == (num_tokens > 0)


def test_whole_sequences_attend_and_split_ones_are_stood_in_for(runner: ModelRunner) -> None:
    """Rank 0 holds sequence 0 whole, and half of sequence 1, of which it gets half of the heads."""
    heads, width = runner.config.num_heads, 16
    first, rows = heads // 2, (30, 200, 100)
    plan = Plan.from_placements(
        lengths=rows[:2],
        homes=[0, 1],
        segments=[[(0, 0, 30)], [(0, 0, 100), (1, 100, 200)]],
        tiles=[[(0, 0, heads, 0, 30)], [(0, 0, first, 0, 200), (1, first, heads, 0, 200)]],
        world_size=2,
        num_heads=heads,
        num_kv_heads=heads,
        planner="",
    )
    schedule = attention_schedule(plan, RankTokens.of(plan, 0), 0, heads, heads)
    channel, options = Channel(None, 0), {"num_heads": heads, "num_kv_heads": heads}
    attention = ReplayAttention(schedule, channel, CPU, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(130, heads, width, generator=generator, requires_grad=True) for _ in range(3)]
    y = attention(*qkv)
    y.square().sum().backward()
    alone = [x.detach()[:30].requires_grad_() for x in qkv]
    expected = local_attention([30])(*alone)
    expected.square().sum().backward()
    assert torch.allclose(y[:30], expected, atol=1e-6)
    assert torch.equal(y[30:], torch.full_like(y[30:], 0.5))
    for x, own in zip(qkv, alone, strict=True):
        assert x.grad is not None and own.grad is not None
        assert torch.allclose(x.grad[:30], own.grad, atol=1e-5)
        assert torch.equal(x.grad[30:], torch.full_like(x.grad[30:], 0.5))


def test_a_replay_warms_up_once_and_compares_with_the_constant_of_the_fit(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run takes a second, or three on rank 1, by a clock of its own; predictions are far below, or above."""
    ran: list[tuple[str, int]] = []
    monkeypatch.setattr(
        "knapformer.measure.replay.rank_share", lambda plan, rank, _: lambda: ran.append((plan.planner, rank))
    )
    monkeypatch.setattr(runner, "train", lambda pack, attention=None: ran.append(("", 0)))

    def fake_seconds(run: Callable[[], None], device: torch.device) -> float:
        run()
        return 3.0 if ran[-1][1] else 1.0

    monkeypatch.setattr("knapformer.measure.runner.seconds_of", fake_seconds)
    rows = [[900, 700], [64]]
    plans = {name: make_plan(rows, planner=name, cost=runner.template) for name in ("home", "whole")}
    found, later = (replay(plans, runner.template, runner, t0_s=t0_s, repeats=2)["home"] for t0_s in (0.0, 100.0))
    own = ran[: len(ran) // 2]
    assert own[0] == ("home", 0), "before the first reference"
    assert {run: own.count(run) for run in set(own)} == {
        ("home", 0): 3,
        ("home", 1): 2,
        ("whole", 0): 2,
        ("whole", 1): 2,
        ("", 0): 9,
    }
    assert found["measured_s"] == [1.0, 3.0] and found["measured_discrepancy"] == 0.5
    passes = runner.template.num_layers * runner.template.pass_factor
    busy = [passes * s for s in evaluate(plans["home"].with_heads(7, 7), runner.template).rank_busy_s]
    assert found["predicted_s"] == pytest.approx(busy)
    assert later["predicted_s"] == pytest.approx([100 + s for s in busy])
    assert later["predicted_step_s"] == pytest.approx(found["predicted_step_s"] + 100)
    assert 0 > found["worst_error"] == pytest.approx(min(b / m - 1 for b, m in zip(busy, (1, 3), strict=True)))
    assert later["worst_error"] == pytest.approx(99 + busy[0])


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
