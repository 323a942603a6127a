"""The summary of a comparison, against figures worked out by hand."""

from __future__ import annotations

import copy
import io

import pytest
from result_cases import result
from rich.console import Console

from knapformer.demo.results import calibration_line, explanation, results_table, summarize


def test_summary():
    summary = result()["summary"]
    home, bags, moldable = summary.values()
    assert home["step_s"] == 1.0 and home["speedup"] == 1.0  # the warm-up step of 10 s does not count
    assert home["tokens_per_s"] == 400 and home["samples_per_s"] == 3
    assert home["ideal_speedup"] == pytest.approx(0.9 / 0.6)
    assert home["measured_discrepancy"] == pytest.approx(0.5) and bags["measured_discrepancy"] == pytest.approx(0.0)
    assert moldable["speedup"] == pytest.approx(1.6) and moldable["of_ideal"] == pytest.approx(1.6 / 1.5)
    assert bags["predicted_discrepancy"] == pytest.approx(0.66 / 0.63 - 1)
    assert bags["loss_difference"] == pytest.approx(1e-6) and moldable["loss_difference"] == 0.0
    assert bags["exchange_s"] == pytest.approx(0.1) and bags["megabytes"] == pytest.approx(3.0)
    assert home["first_loss"] == pytest.approx(2.0) and home["last_loss"] == pytest.approx(1.0)


def test_a_slower_rank_sets_the_step():
    content = result()
    slower = copy.deepcopy(content)
    slower["planners"]["moldable"]["step_s"][1] = [4.0] * 4
    assert summarize(slower)["moldable"]["step_s"] == 4.0 != content["summary"]["moldable"]["step_s"]


def test_profiled_steps_count_for_busy_time_only():
    """As on CUDA: a step has either a wall time or a busy time."""
    content = result()
    for notes in content["planners"].values():
        notes["step_s"] = [[None if i == 2 else s for i, s in enumerate(rank)] for rank in notes["step_s"]]
        notes["busy_s"] = [[s if i == 2 else None for i, s in enumerate(rank)] for rank in notes["busy_s"]]
    assert summarize(content) == content["summary"]


def test_the_table_says_it_all():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(results_table(result()["summary"]))
    text = console.export_text()
    rows = [line.split() for line in text.splitlines()]
    assert ["moldable", "625", "640", "4.80", "8.1/3.3", "%", "50", "3.0", "1.60", "107", "%", "0e+00"] in rows
    assert ["bags:g2n1", "800", "500", "3.75", "4.8/0.0", "%", "100", "3.0", "1.25", "83", "%", "1e-06"] in rows
    assert "…" not in text
    assert explanation(result()).startswith("Ideal speed-up 1.50 ×: home's measured max/mean busy time. Medians over 3")
    assert calibration_line(result()) == "cost model: as given"
