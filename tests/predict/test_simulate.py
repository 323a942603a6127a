"""Simulations: presets, tables, the command line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from knapformer.cli import main
from knapformer.errors import ConfigurationError
from knapformer.given.shapes import model_shape
from knapformer.plans.registry import PlannerSpec
from knapformer.predict.hardware import HARDWARE, hardware
from knapformer.predict.memory import MemoryModel
from knapformer.predict.presets import comparisons, run_comparison
from knapformer.predict.simulate import drawn_from, setting_of, simulate
from knapformer.predict.simulate_tables import markdown

SPECS = [PlannerSpec.parse(name) for name in ("home", "bags:g4n8", "moldable")]


def test_hardware_costs_follow_its_figures() -> None:
    shape = model_shape("flux.1-dev")
    for device in HARDWARE.values():
        cost = device.cost(shape)
        assert cost.flops_per_s < device.peak_flops_per_s
        assert cost.machine.intra_node_bytes_per_s < device.intra_node_peak_bytes_per_s
        attention_flops_per_s = cost.flops_per_s / cost.gamma
        assert attention_flops_per_s == pytest.approx(device.attention_fraction * device.peak_flops_per_s)
    assert hardware("H100").cost(shape, recompute=False).pass_factor == 3.0
    with pytest.raises(ConfigurationError, match="unknown hardware 'tpu'; known: a100, a800"):
        hardware("tpu")


def test_joint_reproduces_the_papers_two_to_three_times() -> None:
    result = run_comparison(comparisons("knapformer")[2], num_steps=2)
    assert 2.0 < result["ratios"]["best bags over home"] < 3.2
    assert result["planners"]["bags:g4n8"]["discrepancy"] < 0.01
    assert result["ratios"]["moldable over best bags"] > 1.0


def test_equal_seeds_give_equal_steps_and_others_others() -> None:
    first, again, other = (drawn_from("mixres", 32, seed)().tokens.tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_timeline_and_formula_agree_and_fsdp_adds_little_on_fast_links() -> None:
    device, shape = hardware("h200"), model_shape("flux.1-dev")
    memory = MemoryModel.of_model("flux.1-dev", shape, shard_size=8)
    setting = setting_of(device.cost(shape), device, memory, num_ranks=32)
    steps = [drawn_from("joint", 32, 3)()]
    plain = simulate(steps, SPECS, replace(setting, sharding=None, exchange_latency_s=0.0))
    sharded = simulate(steps, SPECS, setting)
    for name in plain:
        assert plain[name]["timeline_over_formula"] == pytest.approx(1.0, abs=0.02)
        assert plain[name]["step_s"] < sharded[name]["step_s"] < 1.05 * plain[name]["step_s"]


def test_a_cap_that_cannot_hold_a_step_is_a_row_that_says_so() -> None:
    setting = setting_of(hardware("h100").cost(model_shape("flux.1-dev")), None, None, num_ranks=32)
    rows = simulate([drawn_from("joint", 32, 0)()], SPECS, setting, max_tokens_per_rank=5000)
    assert "error" in rows["moldable"] and "step_s" in rows["home"]


def test_every_preset_names_what_exists() -> None:
    for preset in ("knapformer", "zellige", "open-sora"):
        for comparison in comparisons(preset):
            assert comparison.num_ranks % comparison.shard_size == 0
            drawn_from(comparison.workload, comparison.num_ranks, 0)()
    with pytest.raises(ConfigurationError, match="unknown preset 'x'; known: knapformer, zellige, open-sora"):
        comparisons("x")


def test_command_writes_json_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r" / "mixres.json"
    arguments = ["simulate", "--workload", "mixres", "--planners", "home,moldable", "--steps", "2", "-o", str(file)]
    assert main([*arguments, "--json"]) == 0
    printed, written = json.loads(capsys.readouterr().out), json.loads(file.read_text())
    assert printed == written
    assert written["results"][0]["planners"]["moldable"]["speedup"] > 2
    assert "NVIDIA H100" in written["hardware"]["h100"]["source"]
    page = file.with_suffix(".md").read_text()
    assert page.strip() == markdown("Simulated: mixres", written["command"], written["results"]).strip()
    assert "| moldable |" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "knapformer", "--workload", "joint"], "give --preset or --workload, one of them"),
        (["--workload", "nonsense"], "'nonsense' is neither a workload"),
        (["--workload", "joint", "--model", "bert"], "unknown model 'bert'; known:"),
        (["--workload", "joint", "--planners", "best"], "unknown planner 'best'"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
