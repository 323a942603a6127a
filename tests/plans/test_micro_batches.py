"""Splitting an optimizer step into micro-steps: nothing is lost, work is level, caps hold."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer.errors import CapacityError, ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths
from knapformer.plans.micro_batches import join_local, split_micro_batches
from knapformer.plans.planners import evaluate, make_plan
from knapformer.workloads.workloads import workload

COST = CostModel()
ROWS = st.lists(st.lists(st.integers(0, 5000), max_size=6), min_size=1, max_size=5)


@settings(deadline=None)
@given(ROWS, st.integers(1, 5))
def test_every_sequence_runs_once_at_its_own_home(rows: list[list[int]], count: int) -> None:
    lengths = Lengths.from_ranks(rows)
    parts = split_micro_batches(lengths, count, COST)
    assert len(parts) == count
    assert sorted(np.concatenate([part.ids for part in parts]).tolist()) == list(range(lengths.num_sequences))
    for part in parts:
        for rank, row in enumerate(rows):
            assert part.lengths.of_rank(rank).tolist() == [row[i] for i in part.of_rank(rank, lengths)]


@pytest.mark.parametrize("seed", range(3))
def test_micro_steps_of_joint_are_level(seed: int) -> None:
    """Four micro-batches of joint: the largest makespan is within 2 % of the mean; as loaded it is not."""
    loaded = [workload("joint", seed=4 * seed + i) for i in range(4)]
    everything = Lengths.from_ranks([list(chain(*rows)) for rows in zip(*loaded, strict=True)])

    def makespans(parts: list[Lengths], planner: str) -> list[float]:
        return [evaluate(make_plan(part, planner=planner, cost=COST), COST).makespan_s for part in parts]

    level = makespans([part.lengths for part in split_micro_batches(everything, 4, COST)], "moldable")
    assert max(level) <= 1.02 * np.mean(level)
    as_loaded = makespans([Lengths.from_ranks(rows) for rows in loaded], "moldable")
    assert sum(level) <= 1.01 * sum(as_loaded)


def test_uneven_micro_batches_gain() -> None:
    """One micro-batch of videos and three of images come out as two equal micro-steps."""
    loaded = [[[9000], [9000]], [[256] * 8, [256] * 8], [[256] * 8, [256] * 8], [[256] * 8, [256] * 8]]
    everything = Lengths.from_ranks([list(chain(*rows)) for rows in zip(*loaded, strict=True)])
    tokens = [part.lengths.num_tokens for part in split_micro_batches(everything, 2, COST)]
    assert max(tokens) == min(tokens) == (2 * 9000 + 6 * 8 * 256) // 2


def test_streams_are_split_with_their_sequences() -> None:
    lengths = Lengths.from_ranks([{"text": [1, 2, 3], "visual": [10, 200, 30]}, {"text": [4], "visual": [40]}])
    parts = split_micro_batches(lengths, 2, COST)
    for part in parts:
        for (name, own), (_, everyones) in zip(part.lengths.streams, lengths.streams, strict=True):
            assert own.tolist() == everyones[part.ids].tolist(), name


@settings(deadline=None)
@given(ROWS, st.integers(1, 4), st.integers(0, 4000))
def test_explicit_caps_hold_or_are_refused(rows: list[list[int]], count: int, cap: int) -> None:
    lengths = Lengths.from_ranks(rows)
    try:
        parts = split_micro_batches(lengths, count, COST, cap)
    except CapacityError as error:
        assert str(cap * len(rows)) in str(error)
    else:
        assert all(part.lengths.num_tokens <= cap * len(rows) for part in parts)


def test_what_cannot_fit_says_by_how_much() -> None:
    lengths = Lengths.from_ranks([[100, 100], [100]])
    with pytest.raises(CapacityError, match=r"300 tokens, max_tokens_per_rank allows 100 in each of 2 .* 100 too many"):
        split_micro_batches(lengths, 2, COST, 50)
    with pytest.raises(CapacityError, match=r"100 tokens fits in no micro-step: 98 of 98 tokens are free"):
        split_micro_batches(lengths, 4, COST, 49)
    with pytest.raises(ConfigurationError, match="at least one micro-batch, got 0"):
        split_micro_batches(lengths, 0, COST)


def test_a_cap_that_the_step_just_fills_holds_it() -> None:
    parts = split_micro_batches(Lengths.from_ranks([[100, 60], [40]]), 2, COST, 50)
    assert [part.lengths.num_tokens for part in parts] == [100, 100]


def test_the_automatic_cap_binds_where_attention_outweighs_tokens() -> None:
    """A video works as long as 150 images, but has a quarter of their tokens: some images join it."""
    lengths = Lengths.from_ranks([[8000], [200] * 150])
    heavy = CostModel(gamma=50.0)
    assert heavy.work_s([8000]) > 150 * heavy.work_s([200])
    tokens = [part.lengths.num_tokens for part in split_micro_batches(lengths, 2, heavy)]
    assert sum(tokens) == 38_000
    assert 28_500 - 200 < max(tokens) <= 28_500
    over = [part.lengths.num_tokens for part in split_micro_batches(Lengths.from_ranks([[90], [1]]), 3, COST)]
    assert sorted(over) == [0, 1, 90], "a sequence over the automatic cap still runs"


def test_joining_needs_equal_streams() -> None:
    one = {"text": np.asarray([1]), "visual": np.asarray([2])}
    assert {k: v.tolist() for k, v in join_local([one, one]).items()} == {"text": [1, 1], "visual": [2, 2]}
    with pytest.raises(ConfigurationError, match=r"micro-batch 1 names streams \[''\], micro-batch 0 \['text', 'v"):
        join_local([one, {"": np.asarray([1])}])
    with pytest.raises(ConfigurationError, match="at least one micro-batch, got none"):
        join_local([])
