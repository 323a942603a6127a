"""The host's work in an exchange follows the rank's peers: kernels and calls counted, not timed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from knapformer import CostModel, Lengths, Plan, make_plan
from knapformer.execution.exchange import finish, start
from knapformer.execution.routes import JointRoute, sum_runs, sum_segments
from knapformer.execution.transport import Channel, Messages, Waits
from knapformer.schedules.attention import attention_schedule
from knapformer.schedules.joint import JointExchange
from knapformer.schedules.tokens import RankTokens, conditioning_exchange, token_exchange
from knapformer.step import Step

HEADS, WIDTH = 8, 4
COST = CostModel(hidden=HEADS * WIDTH, num_heads=HEADS)
VIEWS = {
    "view",
    "_unsafe_view",
    "split_with_sizes",
    "slice",
    "detach",
    "select",
    "unsqueeze",
    "alias",
    "split",
    "expand",
}


class Kernels(TorchDispatchMode):
    """Counts what is not a view."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS and not name.startswith("empty") and not name.startswith("new_empty"):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Silent:
    """A transport that is done at once."""

    def launch(self, received: Tensor, sent: Tensor, messages: Messages) -> Sequence[Waits]:
        assert len(messages.peers) == len(messages.bytes_to) == len(messages.bytes_from)
        assert sent.numel() == sum(messages.bytes_to) and received.numel() == sum(messages.bytes_from)
        return ()


def over_first(num_ranks: int, world_size: int) -> Plan:
    """One sequence on rank 0 that is split over the first ranks, and a whole one at home on each rank."""
    lengths = [64, *[4] * world_size]
    homes = [0, *range(world_size)]
    bounds = np.linspace(0, 64, num_ranks + 1).astype(int).tolist()
    cuts = np.linspace(0, HEADS, num_ranks + 1).astype(int).tolist()
    return Plan.from_placements(
        lengths=lengths,
        homes=homes,
        segments=[[(r, bounds[r], bounds[r + 1]) for r in range(num_ranks)], *[[(r, 0, 4)] for r in range(world_size)]],
        tiles=[
            [(r, cuts[r], cuts[r + 1], 0, 64) for r in range(num_ranks)],
            *[[(r, 0, HEADS, 0, 4)] for r in range(world_size)],
        ],
        world_size=world_size,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        planner="by hand",
    )


def kernels_of_exchange(num_ranks: int) -> tuple[Counter[str], Counter[str]]:
    """Of q, k and v's exchange, forward and backward."""
    plan = over_first(num_ranks, 16)
    schedule = attention_schedule(plan, RankTokens.of(plan, 0), 0)
    assert len(schedule.before.peers) == num_ranks - 1
    route = JointRoute.of(schedule.before, torch.device("cpu"))
    channel, units = Channel(Silent(), 0), schedule.queries.num_in
    tensors = [torch.randn(units, WIDTH, requires_grad=True) for _ in range(3)]
    for _ in range(2):  # indices are made once
        with Kernels() as forward:
            out = finish(start(tensors, route, channel))
        gradients = [torch.ones_like(x) for x in out]
        with Kernels() as backward:
            torch.autograd.backward(out, gradients)
        for x in tensors:
            x.grad = None
    return forward.found, backward.found


def test_kernels_do_not_grow_with_peers():
    one, seven = kernels_of_exchange(2), kernels_of_exchange(8)
    assert one == seven
    for found in one:
        assert found["index_select"] == 2, found
        assert found["cat"] == 1, found
        assert sum(found.values()) <= 6, found


def test_the_counter_sees_a_kernel_for_each_peer():
    """The negative control."""
    with Kernels() as counted:
        torch.cat([torch.zeros(7).index_select(0, torch.tensor([i])) for i in range(7)])
    assert counted.found["index_select"] == 7


def calls_of_a_step(num_ranks: int, world_size: int) -> int:
    """Python and C functions that one layer's attention enters on rank 0, and its backward pass."""
    plan = over_first(num_ranks, world_size)
    group = SimpleNamespace(rank=0, device=torch.device("cpu"), control=None)
    balancer: Any = SimpleNamespace(
        group=group, channel=Channel(Silent(), 0), cost=COST, kernel="auto", overlap=True, plan=None
    )
    lengths = Lengths.from_ranks([[64, 4], *[[4]] * (world_size - 1)])
    step = Step(balancer, plan, lengths, {})
    q = torch.zeros(step.num_tokens, HEADS, WIDTH, requires_grad=True)
    step.attention(q, q, q).sum().backward()
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        step.attention(q, q, q).sum().backward()
    finally:
        sys.setprofile(None)
    return count


def test_calls_do_not_grow_with_the_world():
    assert calls_of_a_step(4, 8) == calls_of_a_step(4, 512)
    assert calls_of_a_step(8, 512) < calls_of_a_step(2, 512) + 6 * 40


def test_schedules_hold_nothing_of_other_ranks():
    """No array of a schedule grows with the ranks that this one has nothing to do with."""
    sizes = []
    for world_size in (8, 256):
        plan = over_first(4, world_size)
        lengths, tokens = Lengths.from_ranks([[64, 4], *[[4]] * (world_size - 1)]), RankTokens.of(plan, 1)
        attention = attention_schedule(plan, tokens, 1)
        exchanges = [
            token_exchange(plan, lengths, tokens, 1),
            conditioning_exchange(plan, lengths, tokens, 1),
            attention.queries,
            attention.keys,
        ]
        parts = [*exchanges, *(JointExchange.of([e]) for e in exchanges), attention.before]
        sizes.append([arrays(part) for part in parts])
    assert sizes[0] == sizes[1]


def arrays(owner: Any) -> list[int]:
    names = list(getattr(owner, "__slots__", None) or vars(owner))
    found = []
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, np.ndarray):
            found.append(value.size)
        elif hasattr(value, "inner_stride"):
            found += arrays(value)
    return found


def test_index_tensors_are_made_with_the_step():
    plan = make_plan([[64, 4], [4]], planner="ulysses", cost=COST)
    group = SimpleNamespace(rank=0, device=torch.device("cpu"), control=None)
    balancer: Any = SimpleNamespace(group=group, channel=Channel(Silent(), 0), cost=COST, kernel="auto", overlap=True)
    step = Step(balancer, plan, Lengths.from_ranks([[64, 4], [4]]), {})
    made = step.attention._all.lanes[0].made(HEADS, HEADS, torch.device("cpu"))
    q = torch.zeros(step.num_tokens, HEADS, WIDTH)
    step.attention(q, q, q)
    assert list(step.attention._all.lanes[0]._made.values()) == [made]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_are_made_in_order(dtype):
    """Thousands of rows for one unit, none for another: one after another, in float32 at least."""
    generator = torch.Generator().manual_seed(0)
    counts = [5000, 0, 1, 3, 700]
    rows = torch.randn(sum(counts), 3, generator=generator, dtype=torch.float64).to(dtype)
    units = torch.repeat_interleave(torch.arange(5), torch.tensor(counts))
    wide = rows.to(torch.promote_types(dtype, torch.float32))
    found, as_on_cuda = sum_runs(rows, units, 5), sum_segments(wide, units, 5).to(dtype)
    expected = torch.zeros(5, 3, dtype=torch.promote_types(dtype, torch.float32))
    for unit, row in zip(units.tolist(), rows, strict=True):
        expected[unit] += row
    assert torch.equal(found, expected.to(dtype)) and torch.equal(as_on_cuda, found)
    backwards = torch.zeros_like(expected)
    for unit, row in zip(units.flip(0).tolist(), rows.flip(0), strict=True):
        backwards[unit] += row
    if dtype != torch.bfloat16:
        assert not torch.equal(found, backwards.to(dtype)), "the order would not be noticed"
