"""Laws 2 and 3 on CUDA and NCCL, with all GPUs as ranks, and the CUDA kernels against SDPA.

NOT YET RUN ON A GPU: written where there was none. Without a GPU all of it is skipped; the same checks run on gloo
ranks in ``the other folders of tests``.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import routing_cases as cases
import torch
from launch import run_ranks
from model_cases import alone, error, mmdit, pack, samples
from torch import Tensor

from knapformer import Balancer, CostModel
from knapformer.execution.kernels import HALF_DTYPES, choose_kernel, varlen_attention
from knapformer.parallel import checkpoint
from knapformer.step import Step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NUM_RANKS = min(8, torch.cuda.device_count())
BF16_TOLERANCE = 2e-2
"""‖Δ‖/‖reference‖ of two bfloat16 kernels; one rounding is 2**-9."""


def check_routing(rank: int, world_size: int) -> list[str]:
    """Law 2: rows, bytes and the way back, bitwise, for every dtype and trailing shape."""
    balancer, faults = cases.make_balancer(), []
    for ranks in cases.steps(world_size, range(3)):
        step = balancer.prepare(ranks[rank])
        for dtype, trailing in product(cases.DTYPES, cases.TRAILING):
            everything = cases.content(step.lengths.num_tokens, trailing, dtype, seed=1).cuda()
            x = cases.at_home(everything, step.lengths, rank)
            found = cases.check_tensor(step, balancer.channel.meter, everything, x, cases.spoil(""))
            faults += [f"{ranks} {dtype} {trailing}: {fault}" for fault in found]
    return faults


def prepared(mine: list[Any], num_heads: int) -> tuple[Step, list[Tensor]]:
    """A step, and visual rows, text rows, position ids and conditioning at home, on the GPU."""
    balancer = Balancer(CostModel(hidden=8 * num_heads, num_heads=num_heads), planner=cases.planned)
    visual, text, position_ids, conditioning = (x.cuda() for x in pack(mine)[:4])
    visual, text, conditioning = (x if x.requires_grad else x.requires_grad_() for x in (visual, text, conditioning))
    step = balancer.prepare({"text": [len(s.text) for s in mine], "visual": [len(s.visual) for s in mine]})
    return step, [visual, text, position_ids, conditioning]


def forward(model: Any, step: Step, visual: Tensor, text: Tensor, position_ids: Tensor, conditioning: Tensor) -> Tensor:
    """(visual rows at home, 5)."""
    position_ids, conditioning = step.route(position_ids), step.route_conditioning(conditioning)
    text, visual = step.route(text, stream="text"), step.route(visual, stream="visual")
    y = model(visual, text, position_ids, conditioning, step.sequence_index, step.streams, attention=step.attention)
    return step.restore(y, stream="visual")


def check_gradients(rank: int, world_size: int) -> dict[str, float]:
    """Law 3 in float64: output and inputs' gradients of an MMDiT, against each sample alone on the CPU."""
    errors = {}
    for seed, what in product(range(3), (None, "block", "attention")):
        text, visual = [3, 0, 5, 2], [9, 30, 1, 17]
        mine = [s for i, s in enumerate(samples(text, visual, seed=seed)) if i % world_size == rank]
        expected, references = alone(mmdit(5), mine) if mine else (torch.zeros(0, 5, dtype=torch.float64), [])
        model = mmdit(5).cuda()
        if what:
            checkpoint(model, what=what)
        step, tensors = prepared(mine, 5)
        output = forward(model, step, *tensors)
        (output.cpu() * torch.cat([output.new_zeros(0, 5).cpu(), *(s.weight for s in mine)])).sum().backward()
        errors[f"{seed} {what} output"] = error(output.cpu(), expected) if mine else 0.0
        leaves = [x for s in mine for x in s.leaves]
        for i, (leaf, reference) in enumerate(zip(leaves, references[-len(leaves) :] if leaves else [], strict=True)):
            errors[f"{seed} {what} leaf {i}"] = error(leaf.grad, reference)
    return errors


def test_routing():
    assert [fault for own in run_ranks(check_routing, NUM_RANKS, backend="nccl") for fault in own] == []


def test_gradients():
    for own in run_ranks(check_gradients, NUM_RANKS, backend="nccl"):
        assert max(own.values()) < 1e-10, own


def check_the_host_waits_for_nothing(rank: int, _world: int) -> None:
    """A step from routing to its backward. Only ``prepare`` may wait, and it waits for the CPU alone."""
    mine = samples([3, 0, 5, 2], [9, 30, 1, 17], seed=rank)
    model = mmdit(4).cuda()
    for debug_mode in ("default", "error"):  # the first time kernels are built and streams are made
        torch.cuda.set_sync_debug_mode(debug_mode)
        try:
            step, tensors = prepared(mine, 4)
            forward(model, step, *tensors).square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_host_waits_for_nothing():
    run_ranks(check_the_host_waits_for_nothing, NUM_RANKS, backend="nccl")


def test_one_gpu_without_torch_distributed():
    mine = samples([3, 2], [9, 17], seed=0)
    step, tensors = prepared(mine, 4)
    forward(mmdit(4).cuda(), step, *tensors).square().sum().backward()
    assert step.sequence_index.device.type == step.streams.packed.device.type == "cuda"


CASES = [*product(HALF_DTYPES, (False, True), (4, 2), (64,)), *product(HALF_DTYPES, (False,), (2,), (20, 256, 264))]


@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize(("dtype", "causal", "num_kv_heads", "width"), CASES)
def test_kernels_agree_with_sdpa(dtype, causal, num_kv_heads, width, scale):
    """Some entries are query tiles, with more keys than queries: causal ones see those up to their own position."""
    lengths = {"q": [0, 1, 77, 256, 3], "k": [0, 1, 130, 256, 90]}
    cu_q, cu_k = ([sum(own[:i]) for i in range(len(own) + 1)] for own in lengths.values())
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(cu[-1], h, width, generator=generator, device="cuda", dtype=dtype, requires_grad=True)
        for cu, h in ((cu_q, 4), (cu_k, num_kv_heads), (cu_k, num_kv_heads))
    )
    results = []
    for kernel, wide in ((choose_kernel(q), dtype), ("sdpa", torch.float32)):
        given = [x.to(wide) for x in (q, k, v)]
        y = varlen_attention(*given, cu_q, cu_k, scale=scale, causal=causal, kernel=kernel)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), (q, k, v))])
    for found, expected in zip(*results, strict=True):
        assert error(found.float(), expected.float()) < BF16_TOLERANCE
        assert error(found.float().roll(1, 0), expected.float()) > 10 * BF16_TOLERANCE, "the comparison is blind"
