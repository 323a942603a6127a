"""The command line: what it prints and writes, and one clear line for each mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from knapformer.cli import main
from knapformer.given.cost import CostModel
from knapformer.given.shapes import named_shape
from knapformer.plans.plan import Plan
from knapformer.version import __version__


@pytest.fixture
def lengths_file(tmp_path):
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"lengths": [[5000, 300], [200], [], [700, 0]]}))
    return file


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_plan_prints_a_summary_and_a_grid(capsys, lengths_file):
    for planner in (["--planner", "bags", "--topology", "g2n2"], ["--planner", "bags:g2n2"]):
        code, out, err = run(capsys, "plan", lengths_file, *planner)
        assert (code, err) == (0, "")
        assert "5 sequences, 6,200 tokens on 4 ranks" in out
        assert "#0 [0:2500]{0:12}" in out


def test_plan_as_json_and_as_a_file(capsys, lengths_file, tmp_path):
    target = tmp_path / "plan.json"
    code, out, _ = run(capsys, "plan", lengths_file, "--planner", "ulysses", "--json", "-o", target)
    summary = json.loads(out)
    assert code == 0
    assert {"makespan_s", "lower_bound_s", "discrepancy", "bytes", "num_split", "plan_ms"} <= set(summary)
    assert 0 < summary["lower_bound_s"] <= summary["makespan_s"] and summary["num_split"] == 4
    plan = Plan.read(target)
    assert plan.planner == "ulysses" and plan.lengths.tolist() == [5000, 300, 200, 700, 0]


def test_model_cost_and_nodes_change_the_plan(capsys, lengths_file, tmp_path):
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({"hidden": 64, "num_heads": 4, "machine": {"inter_node_bytes_per_s": 1e6}}))
    makespans = {}
    for options in ((), ("--model", "wan2.1-1.3b"), ("--cost", cost), ("--cost", cost, "--ranks-per-node", 2)):
        code, out, _ = run(capsys, "plan", lengths_file, "--planner", "bags", "--topology", "g4n1", "--json", *options)
        assert code == 0
        makespans[options] = json.loads(out)["makespan_s"]
    assert len(set(makespans.values())) == 4


def test_workload_to_plan(capsys, tmp_path):
    target = tmp_path / "lengths.json"
    code, out, _ = run(capsys, "workload", "mixres", "--seed", 3, "-o", target)
    assert code == 0 and "112 sequences" in out
    code, out, _ = run(capsys, "workload", "mixres", "--seed", 3)
    assert json.loads(out) == json.loads(target.read_text())
    code, out, _ = run(capsys, "plan", target, "--planner", "whole", "--json")
    assert code == 0 and json.loads(out)["num_sequences"] == 112


def test_caps_on_the_command_line(capsys, lengths_file):
    arguments = ("plan", lengths_file, "--planner", "home", "--json", "--max-tokens-per-rank")
    assert run(capsys, *arguments, "none")[0] == 0
    assert run(capsys, *arguments, 5300)[0] == 0
    code, _, err = run(capsys, *arguments, 5299)
    assert code == 2 and "rank 0" in err and "5300" in err and "5299" in err


MISTAKES = {
    "bags of another planner": (
        ["--topology", "g3n1"],
        "--topology names bags, which moldable does not use: add --planner bags",
    ),
    "a cap of too many digits": (["--max-tokens-per-rank", "9" * 20], "must have at most 12 digits"),
    "a picture of JSON": (["--json", "--picture", "plan.svg"], "--picture draws the tables"),
    "bags twice": (["--planner", "bags:g2n2", "--topology", "g4n1"], "both give bags"),
    "wrong topology": (["--planner", "bags", "--topology", "g2x2"], "'g2x2' is not of the form"),
    "bags without layout": (["--planner", "bags"], "needs bags"),
    "ranks are no multiple": (["--planner", "bags", "--topology", "g3n1"], "4 ranks is not a multiple of the 3"),
    "unknown preset": (["--model", "flux9"], "unknown model 'flux9'"),
    "unknown planner": (["--planner", "best"], "unknown planner 'best'"),
    "another model's cost": (["--model", "flux.1-dev", "--cost", "small.json"], "small.json holds the cost of a layer"),
    "no cost file": (["--cost", "missing.json"], "cannot read missing.json"),
    "a cap that is none": (["--max-tokens-per-rank", "lots"], "must be a number, auto or none, got 'lots'"),
    "unknown option": (["--topologie", "g2n2"], "No such option: --topologie"),
    "a number that is none": (["--ranks-per-node", "two"], "--ranks-per-node"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, lengths_file, monkeypatch, mistake):
    options, message = MISTAKES[mistake]
    monkeypatch.chdir(lengths_file.parent)
    Path("small.json").write_text(json.dumps({"hidden": 64, "num_heads": 4}))
    code, out, err = run(capsys, "plan", lengths_file, *options)
    assert code == 2 and out == ""
    assert err.startswith("knapformer: ") and err.count("\n") == 1 and "Traceback" not in err
    assert message in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is a JSON object, got list"),
        ('{"lengths": [1, 2]}', "expected"),
        ('{"lengths": [[1], [-2]]}', "rank 1: sequence 0"),
        ('{"lengths": [[1], [2.5]]}', "rank 1: sequence 0: a length must be an integer, got 2.5"),
    ],
)
def test_a_wrong_lengths_file_is_one_line(capsys, tmp_path, content, message):
    file = tmp_path / "lengths.json"
    file.write_text(content)
    code, _, err = run(capsys, "plan", file, "--planner", "home")
    assert code == 2 and err.count("\n") == 1 and message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "missing.json"], "cannot read missing.json: No such file"),
        (["plan"], "Missing argument"),
        (["frobnicate"], "No such command"),
        (["workload", "nonsense"], "neither a workload"),
        (["workload", "mixres", "--ranks", "33"], "33 ranks are not a multiple"),
        (["report", "/nowhere.json"], "No such file or directory"),
        (["workload", "mixres", "-o", "/dev/null/lengths.json"], "cannot be written: Not a directory"),
        (["workload", "lowres", "--seed", "-1"], "--seed"),
        (["workload", "lognormal:99999999:999"], "would have 99,999,999 ranks, at most 65,536"),
        (["workload", "lognormal:9999:999"], "would have 9,989,001 sequences, at most 1,048,576"),
        (["workload", "wan:8:99999999999999:.5"], "sequences, at most 1,048,576"),
        (["workload", "g99999999b999i256f1s0"], "would have 99,999,999 ranks, at most 65,536"),
        (
            ["workload", "g1b1i256f1s0", "--ranks", "100000000"],
            "'--ranks': Input should be less than or equal to 65536",
        ),
        (
            ["workload", "open-sora-2.0-stage1", "--ranks", "100000000"],
            "'--ranks': Input should be less than or equal to 65536",
        ),
        (["calibrate", "--budget", "nan"], "--budget must be a number of seconds above 0, 86,400 at most, got nan"),
        (["replay", "--workload", "lowres", "--budget", "-1"], "--budget must be a number of seconds above 0"),
        (["bench", "--planners", ","], "--planners must be names joined by commas, got ','"),
        (["simulate", "--workload", "lowres", "--planners", ",,"], "--planners must be names joined by commas"),
        (["simulate", "--workload", "lowres", "--shard-size", "5"], "--shard-size must divide 32 ranks, got 5"),
        (["simulate", "--preset", "zellige", "--model", "flux.1-dev"], "a preset has its own --model: leave out"),
        (["calibrate", "--device", "abacus"], "--device must be cpu or cuda, got 'abacus'"),
        (["bench", "--planners", "home,worst"], "unknown planner 'worst'"),
        (["bench", "--planners", "bags"], "bags need a layout"),
        (["bench", "--dtype", "int8"], "dtype must be one of"),
        (["bench", "--checkpoint", "all"], "checkpoint must be one of"),
        (["bench", "--steps", "2"], "warm-up steps must be fewer than steps"),
        (["bench", "--codes", "g1b1"], "'g1b1' is neither"),
        (["bench", "--ranks", "0"], "--ranks"),
        (["bench", "--ranks", "2", "--planners", "bags:g3n1"], "2 ranks is not a multiple of the 3 ranks"),
        (["bench", "--ranks", "2", "--shard-size", "3"], "shards of 3 ranks do not divide 2 ranks"),
    ],
)
def test_other_commands_mistakes(capsys, arguments, message):
    code, _, err = run(capsys, *arguments)
    assert code == 2 and err.count("\n") == 1 and message in err


def test_planning_does_not_import_torch(lengths_file):
    code = (
        "import sys; from knapformer.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules and 9))"
    )
    command = [sys.executable, "-c", code]
    for arguments in (["plan", str(lengths_file), "--planner", "home"], ["workload", "mixres"], ["--help"]):
        assert subprocess.run([*command, *arguments], capture_output=True, check=False).returncode == 0
    control = [sys.executable, "-c", "import torch; " + code, "workload", "mixres"]
    assert subprocess.run(control, capture_output=True, check=False).returncode == 9


def test_version_help_and_names(capsys):
    assert run(capsys, "--version") == (0, __version__ + "\n", "")
    assert run(capsys, "plan", "-h") == run(capsys, "plan", "--help")
    code, out, _ = run(capsys, "list")
    assert code == 0 and all(name in out for name in ("moldable", "wan2.1-1.3b", "h100", "joint", "lognormal:"))


def test_no_arguments_show_help(capsys):
    code, out, _ = run(capsys)
    assert code == 0 and "plan" in out and "workload" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["advise", "zeros.json", "--ranks", "2"], "needs a sequence with tokens, got 2 of length 0"),
        (
            ["advise", "some.json", "--ranks", "2", "--memory-gb", "nan"],
            "--memory-gb must be a number above 0, 1000000 at most, got nan",
        ),
        (["simulate", "--workload", "zeros.json"], "zeros.json: a step without tokens"),
        (["simulate", "--workload", "some.json", "--ranks", "3"], "some.json has lengths of 2 ranks, --ranks is 3"),
        (["simulate", "--workload", "some.json", "--cost", "cost.json", "--model", "flux.1-dev"], "leave --cost out"),
        (["replay", "--workload", "joint", "--cost", "broken.json"], "broken.json is not JSON"),
        (
            ["replay", "--workload", "joint", "--cost", "flux.json"],
            "measured with model flux.1-dev, this is model demo",
        ),
        (["replay", "--workload", "joint", "--cost", "two.json"], "with num_blocks [2, 2], this is num_blocks [1, 1]"),
        (
            ["advise", "halves.csv", "--ranks", "2"],
            "halves.csv: row 2: length must be an integer of at least 1, got 2.5",
        ),
    ],
)
def test_steps_and_files_that_cannot_be_compared(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zeros.json").write_text('{"lengths": [[0], [0]]}')
    (tmp_path / "some.json").write_text('{"lengths": [[10], [20]]}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "halves.csv").write_text("length\n7\n2.5\n")
    cost = {"hidden": 64, "num_heads": 4, "measured": {"model": "flux.1-dev"}}
    (tmp_path / "cost.json").write_text(json.dumps(cost))
    flux = CostModel.from_preset("flux.1-dev").to_dict() | {"measured": {"model": "flux.1-dev"}}
    (tmp_path / "flux.json").write_text(json.dumps(flux))
    demo = CostModel.from_shape(named_shape("demo")).to_dict()
    measured = {"model": "demo", "dtype": "float32", "recompute": False, "num_blocks": [2, 2]}
    (tmp_path / "two.json").write_text(json.dumps(demo | {"measured": measured}))
    code, _, err = run(capsys, *arguments)
    assert code == 2 and err.count("\n") == 1 and message in err
