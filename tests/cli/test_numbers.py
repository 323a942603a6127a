"""Every number that any command takes: values that are none, or beyond all bounds, are refused before any work."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from knapformer.cli import main
from knapformer.cli.main import app

NEEDED = {
    "plan": ["l.json"],
    "workload": ["lowres"],
    "simulate": ["--workload", "mixres"],
    "advise": ["l.csv", "--ranks", "2"],
    "replay": ["--workload", "default-8"],
}
"""What a command needs beside the option that is tried."""

AS_TEXT = {"--seeds", "--lanes", "--max-tokens-per-rank"}
"""Options that are read as text, and are numbers."""

NO_NUMBERS = ("x", "", "nan", "inf", "-inf", "1e400", "1" + "0" * 20, "-1", "1,5", "٣x", "9" * 5000)

WORK = (
    "knapformer.demo.launch.run_comparison",
    "knapformer.plans.planners.make_plan",
    "knapformer.predict.simulate.simulate",
    "knapformer.predict.presets.run_comparison",
    "knapformer.predict.advise.advise",
    "knapformer.measure.calibrate_command.calibrate_to_cost_file",
    "knapformer.measure.replay_command.plan_workload",
    "knapformer.predict.planner_table.bench_planners",
)
"""Where the commands' work begins."""


def options() -> Iterator[tuple[str, str]]:
    for registered in app.registered_commands:
        function = registered.callback
        assert function is not None
        name = registered.name or function.__name__
        for key, parameter in inspect.signature(function).parameters.items():
            kind, option = get_args(parameter.annotation)[:2]
            given = [word for word in getattr(option, "param_decls", None) or () if word.startswith("--")]
            flag = given[0] if given else f"--{key.replace('_', '-')}"
            if {int, float} & {kind, *get_args(kind)} or flag in AS_TEXT:
                yield name, flag


OPTIONS = list(options())


def test_the_sweep_sees_the_options() -> None:
    assert {("demo", "--ranks"), ("bench", "--learning-rate"), ("advise", "--memory-gb"), ("replay", "--scale")} <= set(
        OPTIONS
    )
    assert len(OPTIONS) >= 40


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("l.csv").write_text("length\n100\n4000\n")
    Path("l.json").write_text('{"lengths": [[100, 200], [3]]}')
    for place in WORK:
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("work began"))


@pytest.mark.parametrize(("name", "flag"), OPTIONS)
@pytest.mark.usefixtures("files")
def test_what_is_no_number_is_refused(name: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in NO_NUMBERS:
        code = main([name, *NEEDED.get(name, ()), f"{flag}={value}"])
        out, error = capsys.readouterr()
        assert (code, out, error.count("\n")) == (2, "", 1), (value[:40], code, out[:200], error[:400])
        assert len(error) < 1000 and "Traceback" not in error, error
        words = flag.strip("-").replace("-", " ")
        assert flag in error or words in error.lower(), (value[:40], error)


@pytest.mark.usefixtures("files")
def test_numbers_begin_the_work(capsys: Any) -> None:
    """Else the sweep would see nothing but its own mistakes."""
    for name, flag, value in (("advise", "--seed", "3"), ("plan", "--lanes", "2"), ("demo", "--ranks", "2")):
        with pytest.raises(pytest.fail.Exception, match="work began"):
            main([name, *NEEDED.get(name, ()), f"{flag}={value}"])
