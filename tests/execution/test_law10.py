"""Law 10: every wait ends, and its error names the step, the call and the ranks that were waited for."""

from __future__ import annotations

import re
from datetime import timedelta

import faults
import pytest
import torch.distributed as dist
from faults import CASES, COST, ODD, PLACES, RANKS, TIMEOUT_S, matches
from launch import run_ranks

from knapformer import Balancer
from knapformer.execution.telling import waited_in_vain

SLACK_S = 15.0
"""Beside the timeout: looking for the reason takes 3 s, and the machine may be busy."""

Told = dict[str, tuple[str, str, float]]


@pytest.fixture(scope="module")
def wrong() -> list[Told]:
    return faults.wrong()


@pytest.fixture(scope="module")
def stopped() -> list[Told]:
    return faults.stopped()


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_on_one_rank_is_told_to_the_others(wrong, name):
    for rank in range(RANKS):
        if rank != ODD:
            assert matches(wrong[rank][name], CASES[name][1]), wrong[rank][name]
            assert wrong[rank][name][2] < TIMEOUT_S + SLACK_S


CALL = {
    "before prepare": r"in prepare of step 2 for ranks",
    "between prepare and route": r"in step 2, call 1: route of tokens.* for ranks?",
    "in attention": r"in step 2, call \d+: attention.* for ranks?",
    "midway through an exchange": r"in step 2, call \d+: attention.* for ranks?",
    "in backward": r"in step 2, backward of call \d+: attention.* for ranks?",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_stands_still_is_waited_for_until_the_timeout(stopped, place):
    for rank in range(RANKS):
        kind, text, seconds = stopped[rank][place]
        if rank != ODD:
            assert kind == "RankError" and re.search(
                CALL[place] + r".*(timeout is over|connection was closed)", text
            ), text
            assert re.search(r"waited [\d.]+ s", text)
            assert TIMEOUT_S - 0.5 < seconds < TIMEOUT_S + SLACK_S
        else:
            assert kind == "RankError", "it goes on later, and is told as well"


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_is_killed_is_missed_at_once(tmp_path, place):
    for kind, text, seconds in faults.killed(place, str(tmp_path)):
        assert kind == "RankError" and re.search(CALL[place] + r".* 1.*a connection was closed", text), text
        assert "no answer from [1" in text and seconds < SLACK_S


def timeouts(rank: int, _world: int) -> tuple[timedelta, timedelta, timedelta]:
    """By default that of the default group, which the launcher has given 60 s."""
    default, own = Balancer(COST), Balancer(COST, timeout=timedelta(seconds=5))
    of_data = [b.group.data._get_backend(b.group.device).options._timeout for b in (default, own)]
    dist.barrier()
    return default.group.timeout, *of_data


def test_the_default_timeout_is_the_default_groups():
    assert run_ranks(timeouts, 2) == [tuple(timedelta(seconds=s) for s in (60, 60, 5))] * 2


def test_words():
    found = waited_in_vain("prepare", [*range(20)], None, RuntimeError("Timed out waiting 1000ms"))
    assert found == "waited 0.0 s in prepare for ranks 0, 1, 2, 3, 4, 5, 6, 7, …: the timeout is over"
    assert waited_in_vain("x", [3], None, RuntimeError("Connection closed by peer")).endswith(
        "for rank 3: a connection was closed"
    )
