"""Hostile files and arguments: one line and exit code 2, before any work."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from result_cases import result

from knapformer.cli import main
from knapformer.errors import KnapFormerError
from knapformer.given.lengths import read_lengths
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
        ("bench --steps 100000000", "steps must be 1 to 1,000,000, got 100,000,000"),
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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path, *(found for key, value in inner for found in places(value, (*path, key)))]


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    new = copy.deepcopy(content)
    part = new
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return new


LENGTHS = {"lengths": [[5, 300], {"text": [1], "visual": [2]}, []]}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_fuzzed_files_end_in_our_errors_or_in_what_keeps_the_laws(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "f.json"
    for content, read in ((PLAN, Plan.read), (LENGTHS, read_lengths)):
        path = data.draw(st.sampled_from(places(content)))
        file.write_text(json.dumps(changed(content, path, data.draw(JSON))))
        try:
            found = read(file)
        except KnapFormerError as error:
            assert "\n" not in str(error)
        else:
            if isinstance(found, Plan):
                assert Plan.from_dict(found.to_dict()) == found
                assert found.rank_tokens.sum() == found.lengths.sum()
