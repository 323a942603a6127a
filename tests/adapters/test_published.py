"""A model that was written against the published package's interface, balanced, equals the unbalanced run."""

from __future__ import annotations

import importlib.metadata
import warnings
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch import Tensor, nn

import knapformer
from knapformer.adapters import published
from knapformer.adapters.routing_plan import split_evenly
from knapformer.errors import ConfigurationError
from knapformer.execution.kernels import varlen_attention
from knapformer.given.lengths import Lengths
from knapformer.given.topology import Topology
from knapformer.plans.planners import make_plan

HEADS, WIDTH, BLOCKS = 4, 16, 2
BAGS = "g1n2+g2n1"
LENGTHS = [[5, 17], [3], [], [30, 2, 0, 1]]
"""Of each rank; one loads nothing."""
TOLERANCE = 1e-10
SUMMARY_KEYS = [
    "balance_gpu_ids",
    "bag_id2gpu_ids",
    "gpu_id2bag_id",
    "seq_id2seq_len",
    "seq_id2seq_workload",
    "gpu_id2seq_ids",
    "gpu_id2seq_lens",
    "gpu_id2seq_workloads",
    "gpu_id2chunk_ids",
    "gpu_id2chunk_lens",
    "balance_chunk_id2gpu_id",
    "balance_chunk_id2chunk_len",
    "chunk_id2seq_id",
]


class Gather(torch.autograd.Function):
    """Rows of all ranks of a group, in order of rank; each rank has ``counts`` of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], group: Any) -> Tensor:
        ctx.counts, ctx.group = counts, group
        padded = rows.new_zeros(len(counts), max(counts), rows.shape[1])
        own = rows.new_zeros(max(counts), rows.shape[1])
        own[: len(rows)] = rows
        dist.all_gather(list(padded.unbind()), own, group=group)
        return torch.cat([part[:count] for part, count in zip(padded, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.split(ctx.counts)[dist.get_rank(ctx.group)], None, None


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seq_lens: list[int], balancer: Any, skip_alone: bool) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(1)
        if balancer is not None and not (skip_alone and is_alone(balancer)):
            attn_lens, q, k, v = balancer.pre_attn(q, k, v)
            assert attn_lens.dtype == torch.int32
            seq_lens = attn_lens.tolist()
        bounds = [0, *accumulate(seq_lens)]
        y = varlen_attention(q, k, v, bounds, bounds)
        if balancer is not None and not (skip_alone and is_alone(balancer)):
            chunk_lens, y = balancer.post_attn(y)
            assert int(chunk_lens.sum()) == len(x)
        return self.out(y.flatten(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.attentions = nn.ModuleList(Attention() for _ in range(BLOCKS))
        self.mlps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.gates = nn.Linear(2, 2 * WIDTH)

    def forward(
        self, x: Tensor, vec: Tensor, seq_lens: list[int], balancer: Any = None, skip_alone: bool = False
    ) -> Tensor:
        ids = torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(seq_lens, dtype=torch.int64))
        chunk_lens = seq_lens
        if balancer is not None:
            balancer.plan_routing(seq_lens, WIDTH)
            counts = [len(own) for own in balancer.gpu_id2seq_ids.values()]
            vec = Gather.apply(vec, counts, balancer.balance_process_group)
            local_ids = torch.tensor(balancer.gpu_id2seq_ids[balancer.this_gpu_id], dtype=torch.int64)
            chunk_lens, x, (ids,) = balancer.route(x, [local_ids[ids]])
        first, second = self.gates(vec).chunk(2, dim=-1)
        x = self.embed(x)
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + first[ids] * attention(x, chunk_lens, balancer, skip_alone)
            x = x + second[ids] * torch.tanh(mlp(x))
        return x if balancer is None else balancer.reverse_route(x)[1]


def is_alone(balancer: Any) -> bool:
    return len(balancer.bag_id2gpu_ids[balancer.gpu_id2bag_id[balancer.this_gpu_id]]) == 1


def make_model() -> Model:
    torch.manual_seed(3)
    return Model().double()


def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = ((sum(LENGTHS[rank]), 3), (len(LENGTHS[rank]), 2), (sum(LENGTHS[rank]), WIDTH))
    x, vec, weights = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x.requires_grad_(), vec.requires_grad_(), weights


def run(rank: int, balancer: Any = None, skip_alone: bool = False) -> dict[str, Tensor]:
    model, (x, vec, weights) = make_model(), inputs(rank)
    out = model(x, vec, LENGTHS[rank], balancer, skip_alone)
    (out * weights).sum().backward()
    found = {"output": out.detach(), "x": x.grad, "vec": vec.grad}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if dist.is_initialized():
            dist.all_reduce(gradient)
        found[name] = gradient
    return found


def four_ranks(rank: int, _world_size: int) -> dict[str, Any]:
    balancer = knapformer.SequenceBalancer(BAGS)
    balancer.turn_on_tracking(num_layers=2, include_bwd=True)
    found: dict[str, Any] = {"all": run(rank, balancer), "skip": run(rank, balancer, skip_alone=True)}
    balancer.turn_off_tracking()
    balancer.plan_routing(torch.tensor(LENGTHS[rank], dtype=torch.int64), WIDTH)
    found["summary"] = balancer.get_routing_plan_summary()
    found["tracked"] = (balancer.tracked_tflops, balancer.tracked_imbalances, balancer.tracked_balance_imbalances)
    num_tokens = sum(LENGTHS[rank])
    features = [
        torch.arange(num_tokens)[:, None] + 2**40,
        torch.randn(num_tokens, 2, 3).bfloat16(),
        torch.rand(num_tokens) > 0.5,
    ]
    chunk_lens, rows, moved = balancer.route(torch.randn(num_tokens, 5), features, force_fp32_buffer=True)
    assert [x.dtype for x in moved] == [x.dtype for x in features] and len(rows) == sum(chunk_lens)
    local_lens, _, back = balancer.reverse_route(rows, moved)
    assert local_lens == LENGTHS[rank]
    found["exact"] = all(torch.equal(a, b) for a, b in zip(features, back, strict=True))
    assert balancer.route(torch.randn(num_tokens, 5))[2] is None

    pairs = knapformer.SequenceBalancer("g2n1")
    pairs.plan_routing(LENGTHS[rank], WIDTH)
    found["pairs"] = (pairs.balance_gpu_ids, dist.get_process_group_ranks(pairs.balance_process_group))
    found["own bag"] = pairs.seq_id2assigned_bag_id
    for wrong, text in (([-1], "rank 3: sequence 0: a length must be in"), ("none", "rank 3: lengths must be a list")):
        with pytest.raises(knapformer.LengthsError, match=text):
            balancer.plan_routing(wrong if rank == 3 else LENGTHS[rank], WIDTH)
    with pytest.raises(ConfigurationError, match="rank 2: hidden must be"):
        balancer.plan_routing(LENGTHS[rank], 0 if rank == 2 else WIDTH)
    with pytest.raises(ConfigurationError, match="rank 1: topology 'g2'"):
        knapformer.SequenceBalancer("g2" if rank == 1 else "g2n1")
    wrong_rows = torch.zeros(1 + sum(balancer.gpu_id2chunk_lens[rank]), HEADS, 4)
    if not is_alone(balancer):
        with pytest.raises(
            knapformer.LengthsError, match=rf"rank {rank}: expected {len(wrong_rows) - 1} rows of attention"
        ):
            balancer.pre_attn(wrong_rows, wrong_rows, wrong_rows)
    other_gamma = knapformer.SequenceBalancer(BAGS, gamma=2.0 if rank == 1 else 1.0)
    with pytest.raises(knapformer.DisagreementError, match=r"rank 1 has gamma 2\.0, rank 0 has 1\.0"):
        other_gamma.plan_routing(LENGTHS[rank], WIDTH)
    found["other plan"] = other_plan(rank, balancer)
    balancer.plan_routing([], WIDTH)
    found["nothing"] = (balancer.metrics, balancer.tracked_tflops == found["tracked"][0])
    pairs.nice_print()
    pairs.print_imbalance()
    balancer.print_tracking_results()
    return found


def other_plan(rank: int, balancer: Any) -> str:
    """What is raised where a rank makes another plan of the same step."""
    with mock.patch.object(published, "make_plan", wraps=published.make_plan) as make:
        if rank == 2:
            make.side_effect = lambda lengths, **options: make_plan(lengths, **options | {"planner": "home"})
        try:
            balancer.plan_routing(LENGTHS[rank], WIDTH)
        except knapformer.KnapFormerError as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(four_ranks, 4, timeout_s=90)


@pytest.mark.parametrize("kind", ["all", "skip"])
def test_model_equals_the_unbalanced_run(found: list[dict[str, Any]], kind: str) -> None:
    alone = [run(rank) for rank in range(4)]
    names = [name for name, _ in make_model().named_parameters()]
    for rank in range(4):
        for name in ("output", "x", "vec"):
            assert relative(found[rank][kind][name], alone[rank][name]) < TOLERANCE, (rank, name)
        for name in names:
            wanted = sum(own[name] for own in alone)
            assert relative(found[rank][kind][name], wanted) < TOLERANCE, (rank, name)
    # Negative control: one rank's part alone is far off.
    assert relative(found[3][kind]["embed.weight"], alone[3]["embed.weight"]) > 1e-3


def relative(value: Tensor, wanted: Tensor) -> float:
    return float((value - wanted).norm()) / max(float(wanted.norm()), 1e-300) if wanted.numel() else 0.0


def test_summary(found: list[dict[str, Any]]) -> None:
    summary = found[0]["summary"]
    assert list(summary) == SUMMARY_KEYS
    assert all(other["summary"] == summary for other in found)
    assert summary["balance_gpu_ids"] == [0, 1, 2, 3]
    assert summary["bag_id2gpu_ids"] == {0: [0], 1: [1], 2: [2, 3]}
    assert summary["gpu_id2seq_lens"] == dict(enumerate(LENGTHS))
    assert list(summary["seq_id2seq_len"].values()) == [length for own in LENGTHS for length in own]
    assert summary["seq_id2seq_workload"][0] == 24 * 5 * WIDTH**2 + 4 * 5 * 5 * WIDTH
    held: dict[int, int] = {}
    for chunk, sequence in summary["chunk_id2seq_id"].items():
        held[sequence] = held.get(sequence, 0) + summary["balance_chunk_id2chunk_len"][chunk]
        assert chunk in summary["gpu_id2chunk_ids"][summary["balance_chunk_id2gpu_id"][chunk]]
    assert held == summary["seq_id2seq_len"]
    assert list(summary["chunk_id2seq_id"].values()) == sorted(summary["chunk_id2seq_id"].values())
    longest = [c for c, s in summary["chunk_id2seq_id"].items() if summary["seq_id2seq_len"][s] == 30]
    assert [summary["balance_chunk_id2gpu_id"][c] for c in longest] == [2, 3]
    assert all(own["exact"] for own in found)


def test_tracking_and_groups(found: list[dict[str, Any]]) -> None:
    tflops, before, after = found[1]["tracked"]
    flops = sum(24 * n * WIDTH**2 + 4 * n * n * WIDTH for own in LENGTHS for n in own)
    assert tflops == pytest.approx([6 * flops / 1e12] * 2) and before == before[:1] * 2
    assert 1.0 <= after[0] < before[0]
    work = [sum(24 * n * WIDTH**2 + 4 * n * n * WIDTH for n in own) for own in LENGTHS]
    assert before[0] == pytest.approx(max(work) / (sum(work) / 4))
    assert [own["pairs"] for own in found] == [([0, 1], [0, 1])] * 2 + [([2, 3], [2, 3])] * 2
    assert set(found[2]["own bag"]) == set(range(len(LENGTHS[2]) + len(LENGTHS[3])))


def test_ranks_that_plan_otherwise_are_told(found: list[dict[str, Any]]) -> None:
    """Each raised its own check inside ``four_ranks``, too: another gamma, wrong rows."""
    assert len({own["other plan"] for own in found}) == 1
    assert "rank 2" in found[0]["other plan"]


def test_a_step_without_tokens_is_level(found: list[dict[str, Any]]) -> None:
    for own in found:
        assert own["nothing"] == ({"imbalance": 1.0, "balance_imbalance": 1.0}, True)


def test_the_backward_pass_counts_twice_where_it_counts() -> None:
    balancer = knapformer.SequenceBalancer("g1n1")
    forward = 24 * 5 * 8**2 + 4 * 5 * 5 * 8
    for include_bwd, passes in ((False, 1), (True, 3)):
        balancer.turn_on_tracking(num_layers=2, include_bwd=include_bwd)
        balancer.plan_routing([5], 8)
        assert balancer.tracked_tflops[-1] == pytest.approx(2 * passes * forward / 1e12)
    balancer.turn_off_tracking()
    balancer.plan_routing([5], 8)
    assert len(balancer.tracked_tflops) == len(balancer.tracked_imbalances) == 2


def test_bags_are_filled_by_the_work_of_the_models_width_and_gamma() -> None:
    """By linear work the longest sequence shares its bag; by attention it outweighs the others."""
    lengths, topology = Lengths.from_ranks([[64, 48, 32, 32], []]), Topology.parse("g1n2")
    balancer = published.SequenceBalancer("g1n1")
    balancer.topology = topology
    for width, gamma, alone in ((4096, 1.0, False), (4, 1.0, True), (64, 0.0, False), (64, 100.0, True)):
        balancer.gamma = gamma
        with mock.patch.object(published, "gather_inputs", return_value=(lengths, None)):
            plan, _ = balancer._plan([], width)
        ranks = [plan.placement(i).ranks for i in range(4)]
        assert (ranks.count(ranks[0]) == 1) == alone, (width, gamma, ranks)


def test_clear_errors() -> None:
    balancer = knapformer.SequenceBalancer("g1n1")
    with pytest.raises(ConfigurationError, match="call plan_routing first"):
        balancer.route(torch.zeros(1, 1))
    with pytest.raises(AttributeError, match=r"gpu_id2seq_lens'; call plan_routing first"):
        _ = balancer.gpu_id2seq_lens
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = balancer.nonsense
    with pytest.raises(ConfigurationError, match="6 heads cannot be divided over a bag of 4 ranks"):
        split_evenly(6, 4)
    with pytest.raises(ConfigurationError, match="topology 'g2x1'"):
        knapformer.SequenceBalancer("g2x1")
    balancer.plan_routing([2, 0, 3], 8)
    with pytest.raises(knapformer.LengthsError, match=r"expected 5 rows, got shape \(4, 1\)"):
        balancer.route(torch.zeros(4, 1))


def test_other_package_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        published._warn_of_other_package()
    other = SimpleNamespace(
        files=[Path("knapformer/sequence_balancer.py")], metadata={"Name": "knapformer"}, version="0.0.9"
    )
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: [other])
    with pytest.warns(UserWarning, match=r"another package named knapformer is installed too \(knapformer 0\.0\.9\)"):
        published._warn_of_other_package()
