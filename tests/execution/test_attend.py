"""Attention under a plan as its caller asked for it: mask, scale, kernel, overlap, and what the meter says of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from launch import run_ranks
from plan_cases import random_plan
from torch import Tensor

from knapformer import Balancer, CostModel, Lengths, Plan
from knapformer.execution import attend
from knapformer.execution.kernels import KERNELS
from knapformer.execution.transport import Meter
from knapformer.models import local_attention

HEADS, WIDTH = 4, 8
COST = CostModel(hidden=HEADS * WIDTH, num_heads=HEADS)
LENGTHS = ([5, 17, 0, 3, *[1, 4, 6] * 8], [1, 9, *[7, 2, 3] * 8])
"""More than 16 sequences on each of two ranks."""


def plan_with(split: float) -> Callable[[Lengths], Plan]:
    """Some sequences split, in any way: by tokens, heads and queries."""

    def plan(lengths: Lengths) -> Plan:
        return random_plan(lengths.to_lists(), HEADS, random.Random(7), split=split)

    return plan


PLANNERS = {"nothing split": "home", "some split": plan_with(0.5), "all split": plan_with(1.0)}


def tokens(rank: int, num_heads: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + seed)
    shape = (sum(LENGTHS[rank]), num_heads, WIDTH)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def values(rank: int, wrong: dict[str, Any]) -> dict[str, list[float]]:
    """Largest differences of output and gradients from attention of each sequence alone, by case.

    Args:
        wrong: options that the expected attention has besides, for the negative control; then few cases.
    """
    found: dict[str, list[float]] = {}
    plans = list(product(PLANNERS.items(), (True, False)))
    for (name, planner), overlap in plans[2:3] if wrong else plans:
        step = Balancer(COST, planner=planner, overlap=overlap).prepare(LENGTHS[rank])
        for scale, causal, kv_heads in product((None, 0.11), (False, True), (2,) if wrong else (HEADS, 2)):
            qkv = tokens(rank, HEADS), tokens(rank, kv_heads, 1), tokens(rank, kv_heads, 2)
            y = step.restore(step.attention(*step.route(*qkv), scale=scale, causal=causal))
            options = {"scale": scale, "causal": causal} | wrong
            expected = local_attention(LENGTHS[rank])(*qkv, **options)
            weight = tokens(rank, HEADS, 3).detach()
            pairs = zip(*(torch.autograd.grad(x, qkv, weight) for x in (y, expected)), strict=True)
            errors = [float((a - b).abs().max()) for a, b in [(y, expected), *pairs]]
            found[f"{name}, overlap {overlap}, scale {scale}, causal {causal}, {kv_heads} kv heads"] = errors
    return found


class Recorded:
    """A transport or a message that says when it is used."""

    def __init__(self, real: Any, events: list[str]) -> None:
        self._real, self._events = real, events

    def launch(self, *args: Any, **kwargs: Any) -> list[Any]:
        self._events.append("start")
        return [Recorded(work, self._events) for work in self._real.launch(*args, **kwargs)]

    def wait(self) -> Any:
        if self._events[-1] != "wait":
            self._events.append("wait")
        return self._real.wait()


def order(rank: int, overlap: bool) -> list[str]:
    """What happens in one attention: exchanges start and end, the kernel runs on whole sequences and on tiles."""
    events: list[str] = []

    def fake(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        events.append("kernel of tiles" if q.shape[1] == 1 else "kernel of whole")
        return KERNELS["sdpa"](q, *args, **kwargs)

    KERNELS["fake"] = fake
    try:
        balancer = Balancer(COST, planner=PLANNERS["some split"], kernel="fake", overlap=overlap)
        balancer.channel = replace(balancer.channel, transport=Recorded(balancer.channel.transport, events))
        step = balancer.prepare(LENGTHS[rank])
        x = step.route(tokens(rank, HEADS).detach())
        events.clear()
        step.attention(x, x, x)
    finally:
        del KERNELS["fake"]
    return events


def kernels_of_dtypes(rank: int) -> list[str]:
    """Which kernels "auto" runs for a float32 and a bfloat16 model on one step, where it would choose another each."""
    seen: list[str] = []

    def noting(name: str) -> Callable[..., Tensor]:
        def kernel(*args: Any, **kwargs: Any) -> Tensor:
            seen.append(name)
            return KERNELS["sdpa"](*args, **kwargs)

        return kernel

    original = attend.choose_kernel
    KERNELS.update({name: noting(name) for name in ("torch.float32", "torch.bfloat16")})
    attend.choose_kernel = lambda q: str(q.dtype)
    try:
        step = Balancer(COST, planner="home").prepare(LENGTHS[rank])
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            x = tokens(rank, HEADS, dtype=dtype)
            step.attention(x, x, x)
    finally:
        attend.choose_kernel = original
        for name in set(seen):
            del KERNELS[name]
    return seen


def metered(rank: int) -> dict[str, float]:
    """Seconds on the meter, by a clock that goes on by one whenever it is read."""
    clock, meter = iter(range(10**6)), Meter()
    original, time.perf_counter = time.perf_counter, lambda: float(next(clock))
    try:
        step = Balancer(COST, planner=PLANNERS["some split"], meter=meter).prepare(LENGTHS[rank])
        x = tokens(rank, HEADS).detach()
        found = {"after prepare": meter.seconds}
        y = step.route(x)
        found["one exchange"] = meter.seconds
        step.restore(y)
        found["two exchanges"] = meter.seconds
        meter.clear()
        found["cleared"] = meter.seconds + meter.bytes_sent + meter.num_exchanges
        at_home = Balancer(COST, planner="home", meter=meter).prepare(LENGTHS[rank])
        at_home.attention(*at_home.route(x, x, x))
        at_home.route_conditioning(x[: len(LENGTHS[rank])])
        found["exchanges at home"] = meter.num_exchanges
        found["seconds at home"] = meter.seconds
    finally:
        time.perf_counter = original
    return found


def run_all(rank: int, _world_size: int) -> dict[str, Any]:
    return {
        "values": values(rank, {}),
        "wrong values": {name: values(rank, {name: value}) for name, value in (("scale", 0.2), ("causal", True))},
        "order": {overlap: order(rank, overlap) for overlap in (True, False)},
        "kernels": kernels_of_dtypes(rank),
        "meter": metered(rank),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(run_all, 2)


def test_mask_scale_and_grouped_heads_are_those_that_were_asked_for(found):
    for own in found:
        assert len(own["values"]) == 48
        for name, errors in own["values"].items():
            assert max(errors) < 1e-12, f"{name}: {errors}"


@pytest.mark.parametrize(("option", "same"), [("scale", ""), ("causal", "causal True")])
def test_notices_another_mask_or_scale(found, option, same):
    """The negative control: every value differs wherever the options do."""
    for own in found:
        assert len(own["wrong values"][option]) == 4
        for name, errors in own["wrong values"][option].items():
            if not same or same not in name:
                assert max(errors) > 1e-3, f"{name}: {errors}"


def test_whole_sequences_attend_while_the_others_travel(found):
    for own in found:
        assert own["order"][True] == ["start", "kernel of whole", "wait", "kernel of tiles", "start", "wait"]


def test_they_attend_afterwards_without_overlap(found):
    for own in found:
        assert own["order"][False] == ["start", "wait", "kernel of whole", "kernel of tiles", "start", "wait"]


def test_the_kernel_is_chosen_for_each_dtype(found):
    for own in found:
        assert own["kernels"] == ["torch.float32", "torch.bfloat16", "torch.float32"]


def test_the_meter_counts_launching_and_landing(found):
    for own in found:
        times = own["meter"]
        assert times["after prepare"] == times["cleared"] == 0
        assert times["one exchange"] >= 2
        assert times["two exchanges"] == 2 * times["one exchange"]


def test_the_meter_counts_no_copies_of_what_stays(found):
    for own in found:
        assert own["meter"]["exchanges at home"] == own["meter"]["seconds at home"] == 0
