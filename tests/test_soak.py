"""A short soak with a fixed seed: random balanced steps, in every precision, against the unbalanced run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rank_pool import RankFailureError, RankPool
from soak import judge, run_soak
from soak_cases import draw
from soak_run import Finding


def test_random_cases_equal_the_unbalanced_run() -> None:
    failures = []
    for ranks, cases in ((3, 12), (4, 12), (2, 12)):
        soak = run_soak(seed=1, seconds=200, ranks=[ranks], cases=cases)
        failures += soak.failures
        assert soak.num_cases == cases
    text = "\n\n".join(f"python scripts/soak.py --replay {f['seed']}\n{f['what']}" for f in failures)
    assert not failures, text


def test_notices_a_lost_gradient() -> None:
    """Every case in which the last rank's conditioning has one."""
    soak = run_soak(seed=4, seconds=60, ranks=[2], cases=8, wrong="drop")
    assert len(soak.failures) >= 3
    assert all("conditioning" in failure["what"] or "parameters" in failure["what"] for failure in soak.failures)


@pytest.mark.parametrize(
    ("precision", "error", "own", "is_right"),
    [
        ("float64", 3e-10, 1e-12, False),
        ("float32", 2e-5, 1e-7, False),
        ("float32", 2e-5, 3e-5, True),
        ("bfloat16", 2e-2, 1.5e-2, True),
        ("bfloat16", 3e-2, 1.5e-2, False),
        ("autocast", float("nan"), 1e-2, False),
    ],
)
def test_judges_by_what_the_unbalanced_run_is_off_by(precision: str, error: float, own: float, is_right: bool) -> None:
    finding = Finding("parameters", "weight", apart=error, error=error, own_error=own, norm=1.0, size=10**6)
    (judged,) = judge(replace(draw(0), precision=precision), [finding])
    assert judged.is_right is is_right


def test_the_same_seed_draws_the_same_case() -> None:
    assert [draw(seed) for seed in range(40)] == [draw(seed) for seed in range(40)]
    assert len({draw(seed) for seed in range(40)}) == 40


def stuck(rank: int, world_size: int, state: dict[str, int], item: str) -> int:
    state["calls"] = state.get("calls", 0) + 1
    if rank == 1:
        while item == "hang":
            pass
        if item == "raise":
            raise ValueError("disk full")
    return state["calls"]


@pytest.mark.parametrize(("item", "text"), [("hang", "in stuck"), ("raise", "rank 1 raised")])
def test_ranks_that_hang_or_fail_are_shown(item: str, text: str) -> None:
    pool = RankPool(stuck, 2, timeout_s=3)
    assert pool.run("go") == [1, 1] and pool.run("go") == [2, 2]
    with pytest.raises(RankFailureError, match=text):
        pool.run(item)
