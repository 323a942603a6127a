"""Loss reductions against values computed by hand, and over simulated ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer.errors import ConfigurationError, LengthsError
from knapformer.given.lengths import Lengths
from knapformer.losses import flow_matching_pair, loss_counts, reduce_loss, squared_error
from knapformer.training.losses import Reduction


def test_flow_matching_pair_by_hand():
    noisy, target = flow_matching_pair(
        torch.tensor([[2.0, 4.0], [1.0, 0.0]]), torch.tensor([[6.0, 0.0], [3.0, 5.0]]), torch.tensor([0.25, 1.0])
    )
    assert noisy.tolist() == [[3.0, 3.0], [3.0, 5.0]]
    assert target.tolist() == [[4.0, -4.0], [2.0, 5.0]]
    with pytest.raises(ValueError, match=r"got \(2, 2\), \(2, 2\), \(3,\)"):
        flow_matching_pair(noisy, target, torch.zeros(3))


def test_squared_error_by_hand():
    assert squared_error(torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 0.0]])).tolist() == [6.5]
    half = torch.full((1, 2), 300.0, dtype=torch.float16)
    assert squared_error(half, -half).tolist() == [360_000.0]
    with pytest.raises(ValueError, match=r"got \(1, 2\) and \(2,\)"):
        squared_error(half, half[0])


def test_reductions_by_hand():
    """Samples of 1, 3 and 0 tokens at home; 8 tokens and 5 samples on 2 ranks."""
    losses = torch.tensor([8.0, 1.0, 2.0, 3.0])
    assert reduce_loss(losses, reduction="rank_mean") == 3.5
    assert reduce_loss(losses, reduction="token_mean", num_tokens=8, world_size=2) == 14 * 2 / 8
    mean = reduce_loss(losses, reduction="sample_mean", lengths=[1, 3, 0], num_samples=5, world_size=2)
    torch.testing.assert_close(mean, torch.tensor((8 + 2 + 0) * 2 / 5))


@pytest.mark.parametrize("reduction", ["rank_mean", "token_mean", "sample_mean"])
@pytest.mark.parametrize("num_global", [0, 7])
def test_a_mean_over_nothing_is_zero_with_a_graph(reduction, num_global):
    weight = torch.ones(3, requires_grad=True)
    losses = torch.zeros(0, 3) @ weight
    loss = reduce_loss(
        losses, reduction=reduction, lengths=[], num_tokens=num_global, num_samples=num_global, world_size=2
    )
    assert loss == 0
    loss.backward()
    assert weight.grad.tolist() == [0, 0, 0]
    assert torch.isnan(losses.mean()), "the plain mean that this replaces"


ranks = st.lists(st.lists(st.lists(st.floats(0, 10), max_size=4), max_size=4), min_size=1, max_size=4)


@settings(deadline=None)
@given(ranks)
def test_average_over_ranks_is_the_global_mean(ranks):
    samples = [sample for rank in ranks for sample in rank]
    num_tokens, num_samples = sum(map(len, samples)), len(samples)

    def average(reduction):
        values = [
            reduce_loss(
                torch.tensor([x for sample in rank for x in sample], dtype=torch.float64),
                reduction=reduction,
                lengths=[len(sample) for sample in rank],
                num_tokens=num_tokens,
                num_samples=num_samples,
                world_size=len(ranks),
            )
            for rank in ranks
        ]
        return float(torch.stack(values).mean())

    token_mean = sum(x for sample in samples for x in sample) / max(num_tokens, 1)
    sample_mean = sum(sum(sample) / max(len(sample), 1) for sample in samples) / max(num_samples, 1)
    assert average("token_mean") == pytest.approx(token_mean, rel=1e-12, abs=1e-12)
    assert average("sample_mean") == pytest.approx(sample_mean, rel=1e-12, abs=1e-12)


def test_rank_mean_is_another_objective_than_token_mean():
    first, second = torch.tensor([1.0]), torch.tensor([4.0, 4.0, 4.0])
    rank = (reduce_loss(first, reduction="rank_mean") + reduce_loss(second, reduction="rank_mean")) / 2
    counts = {"num_tokens": 4, "world_size": 2}
    token = sum(reduce_loss(x, reduction="token_mean", **counts) for x in (first, second)) / 2
    assert (rank, token) == (2.5, 3.25)


def test_wrong_arguments():
    losses = torch.ones(4)
    with pytest.raises(ConfigurationError, match="one of rank_mean, token_mean, sample_mean, got 'mean'"):
        reduce_loss(losses, reduction="mean")
    with pytest.raises(ConfigurationError, match="token_mean needs num_tokens, an integer of at least 4, got 3"):
        reduce_loss(losses, reduction="token_mean", num_tokens=3, world_size=1)
    with pytest.raises(ConfigurationError, match=r"token_mean needs world_size.*got None"):
        reduce_loss(losses, reduction="token_mean", num_tokens=4)
    with pytest.raises(ConfigurationError, match="sample_mean needs lengths"):
        reduce_loss(losses, reduction="sample_mean", num_samples=4, world_size=1)
    with pytest.raises(LengthsError, match="sum to 3 tokens, got 4 losses"):
        reduce_loss(losses, reduction="sample_mean", lengths=[1, 2], num_samples=4, world_size=1)
    with pytest.raises(LengthsError, match="sum to 5 tokens, got 4 losses"):
        reduce_loss(losses, reduction="sample_mean", lengths=[1, 4], num_samples=4, world_size=1)
    with pytest.raises(ConfigurationError, match="sample_mean needs num_samples, an integer of at least 2, got 1"):
        reduce_loss(losses, reduction="sample_mean", lengths=[1, 3], num_samples=1, world_size=1)
    for world_size in (0, -1, True, 2.0):
        with pytest.raises(ConfigurationError, match=f"needs world_size, an integer of at least 1, got {world_size}"):
            reduce_loss(losses, reduction="token_mean", num_tokens=4, world_size=world_size)
    for count in (True, 4.0, "4"):
        with pytest.raises(ConfigurationError, match=f"needs num_tokens, an integer of at least 4, got {count!r}"):
            reduce_loss(losses, reduction="token_mean", num_tokens=count, world_size=1)
    with pytest.raises(ValueError, match=r"\(T,\), got \(4, 1\)"):
        reduce_loss(losses[:, None], reduction="rank_mean")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_in_half_precision_are_reduced_in_float32(dtype):
    """65,536 is not a float16, and a third of a bfloat16 is off by 1e-3."""
    losses = torch.full((3 * 2**16,), 1.5, dtype=dtype, requires_grad=True)
    for options in (
        {"reduction": "rank_mean"},
        {"reduction": "token_mean", "num_tokens": len(losses), "world_size": 1},
        {"reduction": "sample_mean", "lengths": [2**16] * 3, "num_samples": 3, "world_size": 1},
    ):
        loss = reduce_loss(losses, **options)
        assert loss.dtype == torch.float32 and abs(float(loss.detach()) - 1.5) < 1e-6, options


def planned(*ranks, **streams):
    """What ``loss_counts`` reads of a step."""
    return SimpleNamespace(lengths=Lengths.from_ranks([*ranks, streams] if streams else ranks))


def test_counts_of_all_ranks_and_micro_batches():
    first, second = planned([4, 2], [], [3]), planned([], [5], [1, 1])
    assert loss_counts(first) == {"num_tokens": 9, "num_samples": 3, "world_size": 3}
    assert loss_counts(first, second) == {"num_tokens": 16, "num_samples": 6, "world_size": 3}
    streams = planned(text=[5, 0], visual=[7, 2])
    assert loss_counts(streams, stream="visual") == {"num_tokens": 9, "num_samples": 2, "world_size": 1}
    with pytest.raises(ConfigurationError, match=r"no stream 'audio'; the lengths have \['text', 'visual'\]"):
        loss_counts(streams, stream="audio")
    with pytest.raises(ConfigurationError, match=r"steps of one balancing group, got 0, of \[\] ranks"):
        loss_counts()
    with pytest.raises(ConfigurationError, match=r"got 2, of \[1, 3\] ranks"):
        loss_counts(first, streams)


def test_counts_of_a_group_that_is_not_all_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    with pytest.raises(ConfigurationError, match="has 3 of 6 ranks, and no step knows the others' tokens: add up"):
        loss_counts(planned([4, 2], [], [3]))


def test_what_backward_divides_by():
    """``rank_mean`` has not divided by the micro-batches' count, and is left to be."""
    losses = torch.tensor([8.0, 1.0, 2.0, 3.0])
    counts = {"num_tokens": 8, "num_samples": 4, "world_size": 2, "lengths": [1, 3], "backward_divides_by": 5}
    found = {name: float(reduce_loss(losses, reduction=name, **counts)) for name in get_args(Reduction)}
    assert found == {"rank_mean": 3.5, "token_mean": 5 * 14 * 2 / 8, "sample_mean": 5 * (8 + 2) * 2 / 4}
    for wrong in (0, 1.5, True, None):
        with pytest.raises(ConfigurationError, match="needs backward_divides_by, an integer of at least 1"):
            reduce_loss(losses, reduction="rank_mean", backward_divides_by=wrong)
