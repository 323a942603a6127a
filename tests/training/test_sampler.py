"""``BalancedBatchSampler`` in loaders of torch, accelerate and torchdata, and on ranks that were told other things."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from launch import run_ranks
from torch.utils.data import DataLoader, Dataset

from knapformer.errors import ConfigurationError, KnapFormerError, LengthsError
from knapformer.training.sampler import BalancedBatchSampler

LENGTHS = np.clip(np.random.default_rng(0).lognormal(6, 1, 400).astype(np.int64), 1, 4000).tolist()


class Positions(Dataset):
    """Whose samples are their own positions."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return index


def sampler(rank=0, num_ranks=4, **settings):
    return BalancedBatchSampler(LENGTHS, **{"tokens_per_rank": 6000, "rank": rank, "num_ranks": num_ranks} | settings)


def loader(own, kind=DataLoader, **options):
    return kind(Positions(), batch_sampler=own, collate_fn=list, **options)


def disturb():
    """The global random state, which must not matter."""
    random.seed(1)
    np.random.seed(random.randrange(99))
    torch.manual_seed(3)
    torch.rand(5)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torch_loads_every_sample_once_an_epoch(num_workers):
    loaders = [loader(sampler(rank), num_workers=num_workers) for rank in range(4 if num_workers == 0 else 1)]
    epochs = []
    for _ in range(2):
        batches = [list(own) for own in loaders]
        assert {len(own) for own in batches} == {len(loaders[0])}
        epochs.append(batches)
    assert epochs[0] != epochs[1]
    if num_workers == 0:
        for batches in epochs:
            assert sorted(s for own in batches for batch in own for s in batch) == list(range(400))
    assert epochs[0][0] == list(sampler(0)), "workers changed the batches"


def test_the_global_random_state_plays_no_part_and_is_left_alone():
    first = list(sampler())
    disturb()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert list(sampler()) == first
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_an_iteration_that_was_left_begins_anew_and_one_that_ended_goes_on():
    own = sampler()
    assert next(iter(own)) == next(iter(own)) and own.epoch == 0
    first, second = list(own), list(own)
    assert own.epoch == 1 and first != second
    own.set_epoch(0)
    assert list(own) == first
    own.set_epoch(0)  # as accelerate does before every iteration
    assert list(own) == second


@pytest.mark.parametrize("num_ranks", [4, 3])
def test_a_resumed_run_sees_the_samples_that_are_left(num_ranks):
    whole = [iter(sampler(rank)) for rank in range(4)]
    seen = [next(own) for own in whole for _ in range(3)]
    one = sampler(1)
    for _, _batch in zip(range(3), one, strict=False):
        pass
    state = json.loads(json.dumps(one.state_dict()))
    disturb()
    resumed = [sampler(rank, num_ranks, seed=77) for rank in range(num_ranks)]
    for own in resumed:
        own.load_state_dict(state)
        own.set_epoch(0)
        assert own.num_steps_done == 3
    rest = [list(own) for own in resumed]
    assert sorted([s for b in seen for s in b] + [s for own in rest for b in own for s in b]) == list(range(400))
    if num_ranks == 4:
        assert rest == [list(own) for own in whole]
    assert [list(own) for own in resumed] == [list(e) for e in map(second_epoch, range(num_ranks), [num_ranks] * 9)]


def second_epoch(rank, num_ranks):
    own = sampler(rank, num_ranks)
    own.set_epoch(1)
    return own


def test_what_the_loop_has_done_counts_not_what_workers_asked_for():
    own = sampler()
    batches = iter(loader(own, num_workers=2))
    done = [next(batches) for _ in range(2)]
    assert own.state_dict() != own.state_dict(2)
    resumed = sampler()
    resumed.load_state_dict(own.state_dict(2))
    assert done + list(resumed) == list(sampler())


def test_steps_tell_their_weights():
    own = sampler(2)
    for index, batch in enumerate(own):
        step = own.step(index)
        assert step.batches[2] == batch and step.num_samples == sum(map(len, step.batches))
        assert step.num_tokens == sum(LENGTHS[s] for b in step.batches for s in b)


def test_weighted_gradients_are_those_of_the_step():
    """float64: each rank's own mean, weighted and averaged over ranks, against the mean over all its samples."""
    torch.manual_seed(0)
    inputs, weight = torch.randn(400, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64, requires_grad=True)

    def mean_loss(samples):
        return (inputs[samples] @ weight).square().mean()

    step = sampler(tokens_per_rank=None, samples_per_rank=9, max_tokens_per_rank=5000).step(0)
    assert len({len(own) for own in step.batches}) > 1
    (expected,) = torch.autograd.grad(mean_loss([s for own in step.batches for s in own]), weight)
    for weights, right in (([step.loss_weight(r) for r in range(4)], True), ([1.0] * 4, False)):
        losses = [w * mean_loss(own) for w, own in zip(weights, step.batches, strict=True)]
        (found,) = torch.autograd.grad(torch.stack(losses).mean(), weight)
        assert bool((found - expected).norm() / expected.norm() < 1e-10) is right


def test_accelerate_deals_out_the_batches_of_all_ranks():
    for even_batches in (True, False):
        prepared = [
            prepare_data_loader(
                loader(sampler(num_ranks=3, in_turns=True)),
                num_processes=3,
                process_index=rank,
                put_on_device=False,
                even_batches=even_batches,
            )
            for rank in range(3)
        ]
        for epoch in range(2):
            found = [list(own) for own in prepared]
            for rank, own in enumerate(found):
                expected = sampler(rank, 3)
                expected.set_epoch(epoch)
                assert own == list(expected), f"epoch {epoch}"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchdata_saves_and_resumes(num_workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    running = loader(sampler(), stateful, num_workers=num_workers)
    everything, batches, states = list(sampler()), iter(running), []
    for _ in range(3):
        next(batches)
        states.append(running.state_dict())
    for done, state in enumerate(states, 1):
        resumed = loader(sampler(), stateful, num_workers=num_workers)
        resumed.load_state_dict(state)
        assert list(resumed) == everything[done:]
        assert list(resumed) == list(second_epoch(0, 4))


def on_ranks(rank, world_size):
    found = [list(BalancedBatchSampler(LENGTHS, samples_per_rank=10, seed=rank + 7))]
    for settings in (
        {"lengths": LENGTHS if rank == 0 else LENGTHS[::-1]},
        {"tokens_per_rank": 6000 + rank},
        {"balance": rank == 1},
        {"lengths": LENGTHS if rank == 0 else [3, -1]},
        {"tokens_per_rank": 6000 if rank == 0 else 0},
        {"lengths": [] if rank == 1 else LENGTHS},
        {"max_tokens_per_rank": 100},
    ):
        try:
            BalancedBatchSampler(**{"lengths": LENGTHS, "tokens_per_rank": 6000} | settings)
            found.append("made")
        except KnapFormerError as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_ranks_agree_or_all_raise_the_same():
    (first, *errors), (second, *same) = run_ranks(on_ranks, 2)
    one = [BalancedBatchSampler(LENGTHS, samples_per_rank=10, seed=7, rank=r, num_ranks=2) for r in range(2)]
    assert [first, second] == [list(own) for own in one], "all ranks take rank 0's seed"
    assert errors == same
    kinds = ["Disagreement", "Disagreement", "Disagreement", "Lengths", "Configuration", "Lengths", "Capacity"]
    assert [name for name, _ in errors] == [f"{kind}Error" for kind in kinds]
    assert all(text.startswith("rank 1's sampler") for _, text in errors[:-1]), errors


def test_arguments_that_are_none():
    with pytest.raises(ConfigurationError, match="give rank and num_ranks, or neither, got 1 and None"):
        BalancedBatchSampler(LENGTHS, samples_per_rank=1, rank=1)
    with pytest.raises(ConfigurationError, match=r"rank must be an integer in 0\.\.1, got 2"):
        sampler(2, 2)
    with pytest.raises(ConfigurationError, match="seed must be"):
        sampler(seed=-1)
    with pytest.raises(LengthsError, match="at least one sample"):
        BalancedBatchSampler([], samples_per_rank=1)
    with pytest.raises(ConfigurationError, match=r"expected the state of a sampler, knapformer\.sampler/1, got \{\}"):
        sampler().load_state_dict({})
    state = BalancedBatchSampler(LENGTHS[::-1], samples_per_rank=1).state_dict()
    with pytest.raises(ConfigurationError, match="other lengths"):
        sampler().load_state_dict(state)


def test_lengths_may_have_streams():
    own = BalancedBatchSampler({"text": [1] * 6, "visual": [9] * 6}, tokens_per_rank=20)
    assert [len(batch) for batch in own] == [2, 2, 2]
