"""Hostile files and arguments: one line and exit code 2, before any work."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from result_cases import result

from knapformer.cli import main
from knapformer.errors import KnapFormerError
from knapformer.plans.plan import Plan

RESULT: dict[str, Any] = json.loads(json.dumps(result()))
PLAN: dict[str, Any] = {
    "schema": "knapformer.plan/1",
    "world_size": 2,
    "num_heads": 4,
    "planner": "x",
    "sequences": [
        {
            "id": 0,
            "length": 9,
            "home": 0,
            "tokens": [{"rank": 0, "start": 0, "end": 9}],
            "heads": [{"rank": 1, "start": 0, "end": 4, "queries": [0, 9]}],
        }
    ],
}
WRONG = (None, [], "text", {}, -1, True, 10**400, float("nan"))
DEEP: Any = [[]]
for _ in range(200):
    DEEP = [DEEP]


WORK = (
    "knapformer.demo.launch.run_comparison",
    "knapformer.predict.simulate.simulate",
    "knapformer.measure.replay_command.plan_workload",
    "knapformer.predict.planner_table.bench_planners",
)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(list(arguments))
    out, error = capsys.readouterr()
    assert code == 2 and out == "" and error.count("\n") == 1 and "Traceback" not in error, (arguments, error)
    return error


@pytest.mark.parametrize("place", ["config", "planners", "summary", "environment", "num_ranks", "created"])
def test_report_names_the_place_that_is_missing_or_wrong(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    for value in (..., *WRONG, DEEP):
        if place == "created" and value == "text":
            continue
        content = copy.deepcopy(RESULT)
        content.pop(place) if value is ... else content.update({place: value})
        file.write_text(json.dumps(content))
        error = refused(capsys, "report", str(file))
        assert f"{file}: {place}" in error, error


@pytest.mark.parametrize("num_ranks", [1_000_000_000, 3, 0])
def test_report_ends_whatever_the_number_of_ranks(
    num_ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(RESULT | {"num_ranks": num_ranks}))
    assert str(file) in refused(capsys, "report", str(file))


def test_report_takes_what_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(RESULT))
    assert main(["report", str(file)]) == 0 and file.with_suffix(".html").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bench --learning-rate nan", "the learning rate must be above 0, 1000 at most, got nan"),
        ("bench --steps 100000000", "--steps"),
        ("bench --codes g99999999b1i256f1s0", "codes must mean 65,536 ranks and samples at most"),
        ("advise l.csv --ranks 100000", "--ranks"),
        ("advise l.csv --ranks 8 --steps 100000000", "--steps"),
        ("advise l.csv --ranks 8 --tokens-per-rank 1000000000", "fewer --ranks, --steps or --tokens-per-rank"),
        ("advise l.csv --ranks 8 --memory-gb 1e300", "1000000 at most, got 1e+300"),
        ("simulate --workload mixres --steps 100000000", "--steps"),
        ("workload lognormal:10000000:1", "at most 65,536"),
        ("workload g1b1i256f1s0 --ranks 100000000", "--ranks"),
        ("bench-planners --seeds 0-99999999999", "--seeds must be at most 1000 of 9 digits"),
        ("simulate --workload mixres -o l.csv/x.json", "--output l.csv/x.json: cannot be written: Not a directory"),
        ("simulate --workload mixres --picture .", "--picture .: cannot be written: Is a directory"),
        ("plan /dev/zero", "/dev/zero has more than 268,435,456 bytes"),
    ],
)
def test_arguments_beyond_their_bounds(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("l.csv").write_text("length\n100\n4000\n")
    assert message in refused(capsys, *arguments.split())


@pytest.mark.parametrize("package", ["skimage", "plotly"])
def test_packages_are_missed_before_the_first_second_of_work(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    monkeypatch.setattr("knapformer.demo.launch.run_comparison", lambda *_, **__: pytest.fail("work began"))
    assert "pip install 'knapformer[demo]'" in refused(capsys, "demo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("simulate --workload mixres -o t.md", "--output t.md: a file of this name goes beside it"),
        ("bench -o t.html", "--output t.html: a file of this name goes beside it"),
        ("simulate --workload mixres -o t.json", "--output t.md: cannot be written: Is a directory"),
        ("demo -o u.json", "--output u.html: cannot be written: Is a directory"),
        ("report v.html", "--output v.html: a file of this name goes beside it"),
    ],
)
def test_what_goes_beside_an_output_is_checked_before_the_work(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("t.md", "u.html"):
        Path(folder).mkdir()
    if arguments.endswith(("t.md", "t.html")):
        Path("t.md").rmdir()
    Path("v.html").write_text(json.dumps(RESULT))
    for work in ("knapformer.demo.launch.run_comparison", "knapformer.predict.simulate.simulate"):
        monkeypatch.setattr(work, lambda *_, **__: pytest.fail("work began"))
    assert message in refused(capsys, *arguments.split())


@pytest.mark.parametrize(
    "arguments",
    [
        "simulate --workload default-8 --planners moldable,cp-sat",
        "replay --workload default-8 --planners cp-sat",
        "bench-planners --cp-sat",
        "bench --planners home,cp-sat",
    ],
)
def test_a_planner_without_its_package_is_told_before_the_work(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ortools" else find(name))
    for work in WORK:
        monkeypatch.setattr(work, lambda *_, **__: pytest.fail("work began"))
    assert "needs ortools: pip install 'knapformer[cp-sat]'" in refused(capsys, *arguments.split())


def test_many_query_tiles_are_checked_in_order_not_in_pairs() -> None:
    """20,000 tiles took a comparison of each with each; overlaps and gaps among them are still found."""
    count = 20_000
    content = copy.deepcopy(PLAN)
    (sequence,) = content["sequences"]
    sequence |= {"length": 2 * count, "tokens": [{"rank": 0, "start": 0, "end": 2 * count}]}
    tiles = [{"rank": i % 2, "start": 0, "end": 4, "queries": [2 * i, 2 * i + 2]} for i in range(count)]
    sequence["heads"] = tiles
    assert len(Plan.from_dict(content).tile_rank) == count
    tiles[777] = tiles[777] | {"queries": [2 * 777 - 1, 2 * 777 + 2]}
    with pytest.raises(KnapFormerError, match=r"query_start=1552, query_end=1554.* and .*query_start=1553.* overlap"):
        Plan.from_dict(content)
    tiles[777] = tiles[777] | {"queries": [2 * 777 + 1, 2 * 777 + 2]}
    with pytest.raises(KnapFormerError, match="tiles cover 159996 of 160000"):
        Plan.from_dict(content)
