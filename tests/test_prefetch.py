"""Prefetched steps are those of ``prepare``, end together, carry errors to all ranks, and resume in mid-epoch."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from launch import run_ranks
from torch.utils.data import DataLoader, Dataset

from knapformer import BalancedBatchSampler, Balancer, CostModel
from knapformer.errors import KnapFormerError

COST = CostModel(hidden=24, num_heads=3, flops_per_s=1e9)
LENGTHS = np.random.default_rng(1).integers(1, 60, 120).tolist()
HEADS, WIDTH = 3, 8


class Rows(Dataset):
    """A sample is its position and its rows, drawn from a seed of its own."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return index, torch.randn(LENGTHS[index], HEADS * WIDTH, generator=torch.Generator().manual_seed(index))


def lengths_of(batch):
    return [len(rows) for _, rows in batch]


def loss_of(batch, step, weight):
    """Of one step on this rank, with the gradient of ``weight`` added up."""
    x = step.route(torch.cat([torch.empty(0, HEADS * WIDTH), *(rows for _, rows in batch)])) * weight
    q = x.view(-1, HEADS, WIDTH)
    out = step.restore(step.attention(q, q, q).flatten(1))
    loss = out.square().sum()
    loss.backward()
    return loss.item()


def trained(steps, most=None):
    """(samples, plan, loss) of each step, and the gradients; the global random state is disturbed on the way."""
    weight, found = torch.ones(HEADS * WIDTH, requires_grad=True), []
    for batch, step in steps:
        random.seed(time.time_ns())
        torch.manual_seed(time.time_ns() % 2**31)
        np.random.seed(time.time_ns() % 2**31)
        found.append(([i for i, _ in batch], step.plan.digest().hex(), loss_of(batch, step, weight)))
        if len(found) == most:
            break
    return found, weight.grad.tolist() if found else []


def loader(rank, num_ranks, **settings):
    settings = {"samples_per_rank": 8, "balance": True, "cost": COST, "seed": 3} | settings
    sampler = BalancedBatchSampler(LENGTHS, rank=rank, num_ranks=num_ranks, **settings)
    return DataLoader(Rows(), batch_sampler=sampler, collate_fn=list)


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "knapformer-prefetch"]


class Late:
    """A loader of so many batches that sleeps, or raises in the place of one of them."""

    def __init__(self, count, sleeps_s=0.0, fails_at=None):
        self.count, self.sleeps_s, self.fails_at = count, sleeps_s, fails_at

    def __iter__(self):
        for index in range(self.count):
            time.sleep(self.sleeps_s)
            if index == self.fails_at:
                raise OSError(f"no file {index}")
            yield [Rows()[index + i] for i in range(3)]


def caught(steps):
    """How many steps ran, and what then came."""
    found, weight = [], torch.ones(HEADS * WIDTH, requires_grad=True)
    try:
        for batch, step in steps:
            found.append(loss_of(batch, step, weight))
        return len(found), "end"
    except KnapFormerError as error:
        return len(found), f"{type(error).__name__}: {error}"


def on_three_ranks(rank, world_size):
    torch.manual_seed(rank)
    balancer, found = Balancer(COST), {}
    plain = loader(rank, 3)
    found["prepared"] = trained((batch, balancer.prepare(lengths_of(batch))) for batch in plain)
    own = loader(rank, 3)
    steps = balancer.prefetch(own, lengths_of, num_rows_of=lambda batch: sum(lengths_of(batch)))
    found["prefetched"] = trained(steps)
    found["second epoch"] = trained(steps), trained((b, balancer.prepare(lengths_of(b))) for b in plain)
    # Left in the middle, with batches prefetched; then resumed on as many ranks and on fewer.
    steps = balancer.prefetch(loader(rank, 3), lengths_of, ahead=3)
    found["begun"] = trained(steps, 2)
    found["threads"] = len(prefetch_threads())
    state = steps.state_dict()
    resumed = balancer.prefetch(loader(rank, 3, seed=99), lengths_of, ahead=1)
    resumed.load_state_dict(state)
    found["resumed"] = trained(resumed)
    found["again"] = trained(steps, 2)
    # Loaders of other lengths, slow ones, and what goes wrong.
    for name, loaders, of in (
        ("uneven", [Late(5), Late(3), Late(4)], lengths_of),
        ("slow", [Late(4), Late(4, 0.05), Late(4)], lengths_of),
        ("none", [Late(5), Late(0), Late(4)], lengths_of),
        ("raises", [Late(5), Late(5, fails_at=2), Late(5)], lengths_of),
        ("raises at the end", [Late(2), Late(5, fails_at=2), Late(5)], lengths_of),
        ("bad lengths", [Late(5)] * 3, lengths_of if rank != 2 else lambda batch: [-1]),
        ("function raises", [Late(5)] * 3, lengths_of if rank != 1 else lambda batch: batch["lengths"]),
    ):
        found[name] = caught(balancer.prefetch(loaders[rank], of))
    found["other call"] = caught(differing(balancer.prefetch(Late(5), lengths_of), rank))
    found["left over"] = len(prefetch_threads())
    group = dist.new_group([0, 1])
    if rank < 2:
        fewer = Balancer(COST, group=group).prefetch(loader(rank, 2, samples_per_rank=5), lengths_of)
        fewer.load_state_dict(state)
        found["on two ranks"] = trained(fewer)
    return found


def differing(steps, rank):
    """Rank 1 routes once more than the others, in the second step."""
    for index, (batch, step) in enumerate(steps):
        if index == 1 and rank == 1:
            step.route(torch.zeros(sum(lengths_of(batch)), 1))
        yield batch, step


def samples_of(found: list[Any]) -> list[int]:
    return [sample for own in found for sample in own[0]]


def test_prefetched_steps():
    ranks = run_ranks(on_three_ranks, 3)
    for own in ranks:
        assert own["prefetched"] == own["prepared"], "the plans, the losses or the gradients differ"
        assert own["second epoch"][0] == own["second epoch"][1] and own["second epoch"][0] != own["prefetched"]
        assert own["threads"] == 0 and own["left over"] == 0
        assert own["begun"] == own["again"] and own["begun"][0] == own["prepared"][0][:2]
        assert own["resumed"][0] == own["prepared"][0][2:]
        assert len({digest for _, digest, _ in own["prepared"][0]}) == 5
    began = [sample for own in ranks for sample in samples_of(own["begun"][0])]
    on_two = [sample for own in ranks[:2] for sample in samples_of(own["on two ranks"][0])]
    assert len(began) == 48 and sorted(began + on_two) == list(range(120))
    errors = {}
    for name, steps in (("uneven", 3), ("slow", 4), ("none", 0), ("raises", 2), ("raises at the end", 2),
                        ("bad lengths", 0), ("function raises", 0), ("other call", None)):  # fmt: skip
        (first, *others) = [own[name] for own in ranks]
        assert all(own == first for own in others), name
        assert steps in (None, first[0]), name
        errors[name] = first[1]
    assert errors["uneven"] == errors["slow"] == errors["none"] == "end"
    assert errors["raises"] == errors["raises at the end"] == "RankError: rank 1: OSError: no file 2"
    assert errors["bad lengths"].startswith("LengthsError: rank 2: sequence 0: a length must be in")
    assert errors["function raises"].startswith("RankError: rank 1: TypeError")
    assert errors["other call"].startswith("DisagreementError: rank ")


def test_one_process_alone():
    found = trained(Balancer(COST).prefetch(loader(0, 1), lengths_of))[0]
    assert sorted(samples_of(found)) == list(range(120)) and len(found) == 15


def test_what_workers_were_asked_for_is_not_done():
    own = loader(0, 1)
    workers = DataLoader(Rows(), batch_sampler=own.batch_sampler, collate_fn=list, num_workers=1)
    steps = Balancer(COST).prefetch(workers, lengths_of)
    begun = trained(steps, 2)[0]
    state = steps.state_dict()
    resumed = Balancer(COST).prefetch(loader(0, 1), lengths_of)
    resumed.load_state_dict(state)
    assert begun + trained(resumed)[0] == trained(Balancer(COST).prefetch(loader(0, 1), lengths_of))[0]
