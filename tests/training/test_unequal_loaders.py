"""Ranks whose loaders have ended go on with batches without samples until all have; gradients are one process's."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("accelerate")

import join_cases
from launch import run_ranks
from loss_cases import relative

from knapformer import Balancer
from knapformer.errors import RankError


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(join_cases.all_loops, join_cases.NUM_RANKS, timeout_s=100, preload=["accelerate"])


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "prefetched", "accelerate"])
def test_every_batch_is_trained_on(ranks: list[Any], way: str) -> None:
    """One rank has no batch at all, one has three. Negative control: gradients of the next step's samples."""
    steps = [[0, 1, 2, 3]] if way == "accelerate" else join_cases.STEPS
    wanted = [join_cases.one_process(ids) for ids in steps]
    for own in ranks:
        assert len(own[way]) == len(steps)
        for found, gradients in zip(own[way], wanted, strict=True):
            assert relative(found, gradients) <= 1e-10
    assert relative(ranks[0][way][0], join_cases.one_process([0, 1, 2])) > 1e-3


def test_without_empty_all_end_with_the_first(ranks: list[Any]) -> None:
    for own in ranks:
        assert own["first end"] == own["first end, prefetched"] == [[0]]


def test_errors_are_those_of_all_ranks(ranks: list[Any]) -> None:
    assert all(own["errors"] == ranks[0]["errors"] for own in ranks)
    errors = ranks[0]["errors"]
    assert errors["loader"] == "RankError: rank 1: OSError: no file"
    assert errors["loader of a rank that is longer"] == "RankError: rank 2: OSError: no file"
    assert errors["empty"] == errors["empty, prefetched"] == "RankError: rank 0: ValueError: no empty batch on 0"
    assert errors["empty on some"] == "DisagreementError: rank 1 has method 'join, with empty', rank 0 has 'join'"
    assert errors["other call"] == "DisagreementError: rank 1 has method 'prepare', rank 0 has 'join, with empty'"


def test_one_process_alone() -> None:
    assert list(Balancer().join([[1], [2]], empty=list)) == [[1], [2]]
    with pytest.raises(RankError, match="OSError: no file") as raised:
        list(Balancer().join(join_cases.Fails([[1]], fails=True)))
    assert isinstance(raised.value.__cause__, OSError)
