"""Means over all ranks are those of one process that holds all data; docs/losses.md says which losses are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import loss_cases
from launch import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import losses as script

PLANS = ("home", "anything")


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(loss_cases.both_jobs, loss_cases.NUM_RANKS, PLANS, timeout_s=200, preload=["accelerate"])


def test_helpers_give_the_means_of_one_process(ranks: list[Any]) -> None:
    """Under each wrapper, with and without accumulation, one rank without samples; wrong counts are noticed."""
    _, found = ranks[0]
    assert len(found) == 2 * (3 * len(loss_cases.ACCUMULATED) + len(loss_cases.WRONG))
    wanted = {reduction: loss_cases.one_process(reduction) for reduction in ("token_mean", "sample_mean")}
    for (wrapper, reduction, way, fault), gradients in found.items():
        error = loss_cases.relative(gradients, wanted[reduction])
        assert error > 0.4 if fault else error <= 1e-10, (wrapper, reduction, way, fault, error)


def test_accelerate_divides_by_the_accumulation_steps(ranks: list[Any]) -> None:
    for reduction in ("token_mean", "sample_mean"):
        halved = ranks[0][1]["accelerate", reduction, "as loaded", "no factor"]
        assert loss_cases.multiple(halved, loss_cases.one_process(reduction)) == pytest.approx(0.5, rel=1e-10)


def test_the_table_of_the_page_is_what_runs(ranks: list[Any]) -> None:
    page = script.PAGE.read_text()
    rows = [line for line in page[page.index(script.BEGIN) : page.index(script.END)].splitlines() if "`" in line]
    found = [script.row(cell, figures=False) for cell in loss_cases.cells([own for own, _ in ranks], PLANS)]
    assert len(rows) == len(found) == 10
    for line, said in zip(rows, found, strict=True):
        cells, new = (text.strip("| \n").split(" | ") for text in (line, said))
        assert cells[:2] == new[:2] and cells[4] == new[4], (line, said)
        assert all(cell.startswith(text) for cell, text in zip(cells[2:4], new[2:4], strict=True)), (line, said)
    assert sum("**no**" in line for line in rows) == 7
