"""What a command predicts: the model that is asked for, at speeds that are its own; what does not fit is marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from knapformer.cli import main
from knapformer.given.cost import CostModel
from knapformer.given.shapes import named_shape

TOY = {"model": "demo", "dtype": "float32", "environment": {"device": "Toy CPU"}}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy's cost file, FLUX's and one for a deeper toy; lengths."""
    monkeypatch.chdir(tmp_path)
    toy = CostModel.from_shape(named_shape("demo"), flops_per_s=2e10)
    flux = CostModel.from_preset("flux.1-dev", flops_per_s=1e14, pass_factor=4.0)
    Path("toy.json").write_text(json.dumps(toy.to_dict() | {"measured": TOY}))
    Path("flux.json").write_text(json.dumps(flux.to_dict() | {"measured": {**TOY, "model": "flux.1-dev"}}))
    Path("lengths.json").write_text('{"lengths": [[4096, 512], [512], [300], [9000]]}')


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    return code, *capsys.readouterr()


COMMANDS = {
    "plan": ("plan", "lengths.json", "--model", "flux.1-dev"),
    "simulate": ("simulate", "--workload", "joint", "--steps", "10000", "--model", "flux.1-dev"),
    "advise": ("advise", "lengths.json", "--ranks", "8", "--model", "flux.1-dev", "--tokens-per-rank", "4608"),
    "replay": ("replay", "--workload", "joint", "--model", "flux.1-dev"),
    "bench": ("bench", "--heads", "24", "--head-width", "128"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_toys_cost_stands_for_no_other_model(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rule in every command, before any work."""

    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("work began")

    for place in ("plans.planners.make_plan", "predict.simulate.make_plan", "measure.runner.ModelRunner.of_model"):
        monkeypatch.setattr(f"knapformer.{place}", work)
    code, out, error = run(capsys, *COMMANDS[command], "--cost", "toy.json")
    assert (code, out) == (2, "") and error.count("\n") == 1
    whose = "measured with model demo, this is model flux.1-dev" if command == "replay" else "of a layer of demo"
    assert f"toy.json {'was ' if command == 'replay' else 'holds the cost '}{whose}" in error


def test_bench_takes_its_own_layers_cost_and_checks_dtype_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "bench", "--cost", "toy.json", "--dtype", "bfloat16")
    assert code == 2 and "toy.json was measured with dtype float32, this is dtype bfloat16" in error
    code, _, error = run(capsys, "bench", "--cost", "toy.json")
    assert code == 2 and "toy.json was measured with device Toy CPU, this is device" in error


def test_a_cost_file_brings_its_model_and_says_where_it_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "lengths.json", "--cost", "flux.json", "--json")
    summary = json.loads(out)
    assert code == 0 and summary["model"] == "flux.1-dev (the cost file's)"
    assert summary["speeds"] == "speeds measured on Toy CPU, assumed links (flux.json)"
    asked = json.loads(run(capsys, "plan", "lengths.json", "--cost", "flux.json", "--model", "flux.1-dev", "--json")[1])
    assert asked["makespan_s"] == summary["makespan_s"] and asked["model"] == "flux.1-dev (as asked)"


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, error = run(capsys, "simulate", "--planners", "home,moldable", "--steps", "1", "--json", *arguments)
    assert code == 0, error
    found: dict[str, Any] = json.loads(out)["results"][0]
    return found


def test_a_workload_plays_its_own_model_unless_another_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    wan = ("--workload", "wan:8:125000:0.5")
    own = simulated(capsys, *wan)
    assert (own["model"], own["model_chosen"]) == ("wan2.1-1.3b", "the workload's own")
    same = simulated(capsys, *wan, "--model", "wan2.1-1.3b")
    other = simulated(capsys, *wan, "--model", "flux.1-dev")
    assert same["planners"]["home"]["step_s"] == own["planners"]["home"]["step_s"]
    assert other["planners"]["home"]["step_s"] > 2 * own["planners"]["home"]["step_s"]
    assert (other["model"], other["workload_model"]) == ("flux.1-dev", "wan2.1-1.3b")
    arguments = ("simulate", *wan, "--model", "flux.1-dev", "--planners", "home", "--steps", "1")
    assert "flux.1-dev (as asked; the workload's own is wan2.1-1.3b)" in run(capsys, *arguments)[1]


def test_what_does_not_fit_is_marked_everywhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Path("long.json").write_text('{"lengths": [[90000], [300], [300], [300]]}')
    arguments = ("simulate", "--workload", "long.json", "--model", "flux.1-dev", "--hardware", "h100", "--ranks", "4")
    row = simulated(capsys, *arguments[1:])["planners"]
    home, moldable = row["home"], row["moldable"]
    assert home["peak_memory_gigabytes"] > home["memory_gigabytes"] == 80 and home["steps_over_memory"] == 1
    assert home["would_fit"] is not None and moldable["steps_over_memory"] == 0 and moldable["would_fit"] is None
    code, out, _ = run(capsys, *arguments, "--planners", "home,moldable", "-o", "r.json", "--picture", "r.svg")
    assert code == 0 and "the 80 GB of a rank" in out and f"{home['peak_memory_gigabytes']:.1f} > 80" in out
    for file in ("r.md", "r.svg"):
        text = Path(file).read_text().replace("&#160;", " ").replace("&gt;", ">")
        assert f"{home['peak_memory_gigabytes']:.1f} > 80" in text, file
        assert "do not fit" in text or "does not fit" in text, file


def test_a_slower_plan_is_called_slower(capsys: pytest.CaptureFixture[str]) -> None:
    Path("even.json").write_text('{"lengths": [[400], [400], [400], [400]]}')
    out = run(capsys, "plan", "even.json", "--planner", "ulysses")[1]
    assert "× slower than home" in out and "faster" not in out
    out = run(capsys, "plan", "lengths.json")[1]
    assert "× faster than home" in out and "slower" not in out
