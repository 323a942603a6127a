"""Epochs in steps: every sample once, under caps, in balance, and resumed with any number of ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer.errors import CapacityError, ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.workloads.arrangement import Arrangement
from knapformer.workloads.sampling import Epoch, SampledStep

COST = CostModel(hidden=512, num_heads=8)


@st.composite
def arrangements(draw, longest):
    by_samples = draw(st.booleans())
    balance = draw(st.booleans())
    return Arrangement(
        num_ranks=draw(st.integers(1, 9)),
        samples_per_rank=draw(st.integers(1, 7)) if by_samples else None,
        tokens_per_rank=None if by_samples else draw(st.integers(1, 6000)),
        max_tokens_per_rank=draw(st.none() | st.integers(max(longest, 1), longest + 4000)),
        max_work_per_rank_s=draw(st.none() | st.floats(1e-9, 1e-6)),
        balance=balance,
        cost=COST,
    )


@st.composite
def epochs(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))  # a list of lengths would take Hypothesis long to draw
    count, longest = draw(st.integers(1, 120)), draw(st.sampled_from([1, 40, 3000]))
    tokens = rng.integers(0, longest + 1, count) * (rng.random(count) < draw(st.sampled_from([1.0, 0.8])))
    arrangement = draw(arrangements(int(tokens.max())))
    return Epoch(tokens, arrangement, seed=draw(st.integers(0, 99)), epoch=draw(st.integers(0, 3)))


def steps_of(epoch: Epoch, first: int | None = None) -> list[SampledStep]:
    start = epoch.num_earlier + epoch.first_step if first is None else first
    return [epoch.step(index) for index in range(start, epoch.num_steps)]


def samples_of(steps: list[SampledStep]) -> list[int]:
    return [sample for step in steps for own in step.batches for sample in own]


@given(epochs())
def test_every_sample_comes_once(epoch):
    assert sorted(samples_of(steps_of(epoch))) == list(range(len(epoch.tokens)))
    assert all(len(step.batches) == epoch.arrangement.num_ranks for step in steps_of(epoch))


@given(epochs())
def test_batches_keep_their_limits(epoch):
    """Of a rank; with ``balance`` of the step, whose tokens are dealt out later."""
    arrangement, work_s = epoch.arrangement, COST.work_s(epoch.tokens)
    share = arrangement.num_ranks if arrangement.balance else 1
    for step in steps_of(epoch):
        parts = [samples_of([step])] if arrangement.balance else step.batches
        for own in parts:
            tokens = int(epoch.tokens[own].sum())
            assert arrangement.max_tokens_per_rank is None or tokens <= share * arrangement.max_tokens_per_rank
            if arrangement.samples_per_rank is not None:
                assert len(own) <= share * arrangement.samples_per_rank
            if len(own) > share:  # fewer may be single samples, or those the last step needed
                assert arrangement.tokens_per_rank is None or tokens <= share * arrangement.tokens_per_rank
                if arrangement.max_work_per_rank_s is not None:
                    assert work_s[own].sum() <= share * arrangement.max_work_per_rank_s * (1 + 1e-9)


@given(epochs())
def test_only_the_last_step_leaves_a_rank_without_samples(epoch):
    if epoch.arrangement.balance:
        for step in steps_of(epoch):
            assert all(step.batches) or step.num_samples < len(step.batches)
        return
    *full, last = steps_of(epoch)
    assert all(all(step.batches) for step in full)
    if not all(last.batches):
        assert last.num_samples < len(last.batches)
        assert all(len(own) == 1 for step in full for own in step.batches), "a sample could have been spared"


@given(epochs())
def test_a_batch_is_closed_only_where_the_next_sample_would_break_a_limit(epoch):
    """So a rank gets as much as was asked: two batches that follow one another never fit into one."""
    arrangement = epoch.arrangement
    if not arrangement.balance or arrangement.max_work_per_rank_s is not None:
        return
    steps, share = steps_of(epoch), arrangement.num_ranks
    for index, step in enumerate(steps[:-2]):
        tokens = step.num_tokens + int(epoch.tokens[epoch.steps.batches(index + 1)[0][0]])
        by_tokens = arrangement.most_tokens is not None and tokens > share * arrangement.most_tokens
        by_samples = arrangement.samples_per_rank and step.num_samples == share * arrangement.samples_per_rank
        assert by_tokens or by_samples


@settings(max_examples=60)
@given(st.data())
def test_resumed_on_any_number_of_ranks_the_rest_is_the_rest(data):
    epoch = data.draw(epochs())
    longest = int(epoch.tokens.max())
    seen: list[int] = []
    for _ in range(3):
        start = epoch.num_earlier + epoch.first_step
        stop = data.draw(st.integers(start, epoch.num_steps))
        seen += samples_of([epoch.step(index) for index in range(start, stop)])
        saved = json.loads(json.dumps([[a.to_dict(), n] for a, n in epoch.done_after(stop)]))
        done = tuple((Arrangement.from_dict(content), n) for content, n in saved)
        arrangement = data.draw(st.just(epoch.arrangement) | arrangements(longest))
        resumed = Epoch(epoch.tokens, arrangement, seed=epoch.seed, epoch=epoch.number, done=done)
        if arrangement == epoch.arrangement:
            assert steps_of(resumed) == steps_of(epoch, stop)
        epoch = resumed
    assert sorted(seen + samples_of(steps_of(epoch))) == list(range(len(epoch.tokens)))


def lognormal(count: int) -> np.ndarray:
    return np.clip(np.random.default_rng(3).lognormal(7.3, 1.0, count).astype(np.int64), 16, 30_000)


def discrepancies(epoch: Epoch) -> np.ndarray:
    work_s = epoch.arrangement.cost.work_s(epoch.tokens)
    loads = np.asarray([[work_s[own].sum() for own in step.batches] for step in steps_of(epoch)])
    return loads.max(axis=1) / loads.mean(axis=1) - 1


@pytest.mark.parametrize("size", [{"tokens_per_rank": 40_000}, {"samples_per_rank": 12}])
def test_ranks_take_equally_long(size):
    epoch = Epoch(lognormal(12_000), Arrangement(16, cost=COST, **size), seed=1, epoch=0)
    found = discrepancies(epoch)
    assert found[:-1].mean() < 0.01 and found[:-1].max() < 0.2
    chance = np.random.default_rng(0).permutation(len(epoch.tokens))[: 16 * 40 * 12].reshape(40, 16, 12)
    loads = COST.work_s(epoch.tokens)[chance].sum(axis=2)
    assert (loads.max(axis=1) / loads.mean(axis=1) - 1).mean() > 0.3, "the lengths are too alike to show anything"


def test_a_step_is_dealt_better_than_its_batches_where_that_is_possible():
    tokens = np.asarray([100, 100, 900, 900, 500, 500, 500, 500], np.int64)
    epoch = Epoch(tokens, Arrangement(4, samples_per_rank=2, cost=COST), seed=0, epoch=0, shuffle=False)
    assert sorted(map(sorted, (tokens[own].tolist() for own in epoch.step(0).batches))) == [
        [100, 900], [100, 900], [500, 500], [500, 500],
    ]  # fmt: skip


def test_with_balance_the_shuffle_is_left_as_it_is():
    tokens = lognormal(2000)
    epoch = Epoch(tokens, Arrangement(4, samples_per_rank=10, balance=True, cost=COST), seed=5, epoch=2)
    order = np.random.Generator(np.random.PCG64([5, 2])).permutation(2000)
    assert [set(samples_of([epoch.step(i)])) for i in range(50)] == [
        set(order[40 * i : 40 * i + 40]) for i in range(50)
    ]


def test_the_shuffle_is_the_same_on_every_machine_and_numpy():
    """If a release of NumPy shuffled otherwise, ranks that run different ones would train on other samples."""
    epoch = Epoch(np.arange(1, 11), Arrangement(1, samples_per_rank=10, balance=True), seed=1, epoch=2)
    assert epoch.steps.samples.tolist() == [8, 5, 6, 0, 9, 1, 4, 3, 7, 2]


def test_epochs_and_seeds_differ():
    tokens = lognormal(300)
    orders = {
        tuple(samples_of(steps_of(Epoch(tokens, Arrangement(2, samples_per_rank=4), seed=s, epoch=e))))
        for s in range(3)
        for e in range(3)
    }
    assert len(orders) == 9


def test_a_sample_beyond_the_cap_is_refused():
    tokens = np.asarray([10, 900, 20], np.int64)
    with pytest.raises(CapacityError, match="sample 1 has 900 tokens, max_tokens_per_rank 500 allows 500 on a rank"):
        Epoch(tokens, Arrangement(2, samples_per_rank=1, max_tokens_per_rank=500), seed=0, epoch=0)
    whole = Epoch(tokens, Arrangement(2, samples_per_rank=1, max_tokens_per_rank=500, balance=True), seed=0, epoch=0)
    assert whole.num_steps == 2
    with pytest.raises(CapacityError, match="allows 800 over 2 ranks"):
        Epoch(tokens, Arrangement(2, samples_per_rank=1, max_tokens_per_rank=400, balance=True), seed=0, epoch=0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "samples_per_rank or tokens_per_rank, one of them, got None and None"),
        ({"samples_per_rank": 1, "tokens_per_rank": 1}, "one of them, got 1 and 1"),
        ({"samples_per_rank": 0}, "samples_per_rank must be an integer of at least 1, got 0"),
        ({"samples_per_rank": True}, "got True"),
        ({"samples_per_rank": 1, "max_work_per_rank_s": 0.0}, "max_work_per_rank_s must be a number above 0, got 0.0"),
        ({"samples_per_rank": 1, "max_work_per_rank_s": float("nan")}, "got nan"),
        ({"samples_per_rank": 1, "balance": 1}, "balance True or False"),
    ],
)
def test_arrangements_say_what_is_wrong(values, words):
    with pytest.raises(ConfigurationError, match=words):
        Arrangement(2, **values)


def test_steps_that_are_not_there():
    epoch = Epoch(np.arange(1, 9), Arrangement(2, samples_per_rank=2), seed=0, epoch=0)
    with pytest.raises(ConfigurationError, match=r"this epoch has the steps 0\.\.1, got 2"):
        epoch.step(2)
    with pytest.raises(ConfigurationError, match=r"steps done must be in 0\.\.2 of this epoch, got 3"):
        epoch.done_after(3)
    with pytest.raises(ConfigurationError, match="3 steps are said to be done of an epoch of 2"):
        Epoch(epoch.tokens, epoch.arrangement, seed=0, epoch=0, done=((epoch.arrangement, 3),))


@given(epochs(), st.sampled_from(["sample_mean", "token_mean"]))
def test_loss_weights_make_the_mean_of_ranks_the_mean_of_the_step(epoch, mean):
    values = np.random.default_rng(0).standard_normal(len(epoch.tokens))
    for step in steps_of(epoch):
        everything = samples_of([step])
        of = np.ones(len(epoch.tokens)) if mean == "sample_mean" else epoch.tokens.astype(float)
        if not of[everything].sum():
            continue
        expected = (values * of)[everything].sum() / of[everything].sum()
        own = [(values * of)[b].sum() / of[b].sum() if of[b].sum() else 0.0 for b in step.batches]
        weighted = np.mean([step.loss_weight(rank, mean) * own[rank] for rank in range(len(own))])
        assert weighted == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_loss_weights_name_their_means():
    with pytest.raises(ConfigurationError, match="got 'rank_mean'"):
        SampledStep(([0], [1]), (3, 4)).loss_weight(0, "rank_mean")
