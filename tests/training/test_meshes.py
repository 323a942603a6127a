"""A balancing group along one axis of a device mesh: tensor parallelism, FSDP2 or replicas along the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from knapformer import Balancer, CostModel
from knapformer.models import local_attention
from knapformer.training.parallel import checkpoint

WIDTH, HEADS = 24, 6
LENGTHS = [[[70, 5, 0, 31] + [3] * 17, []], [[9], [40, 2]]]
"""Of each of two groups, of each of its two ranks."""


class Block(nn.Module):
    """Attention and an MLP. A rank of a tensor-parallel group has a part of the heads and of the MLP's channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, attention: Any) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(1, (-1, WIDTH // HEADS)) for part in (self.q, self.k, self.v))
        x = x + self.out(attention(q, k, v).flatten(1))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, attention: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, attention)
        return x


def built() -> Model:
    torch.manual_seed(0)
    return Model().double()


def rows_of(group: int, rank: int) -> Tensor:
    random = torch.Generator().manual_seed(10 * group + rank)
    return torch.randn(sum(LENGTHS[group][rank]), WIDTH, generator=random, dtype=torch.float64)


def in_tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    for block in model.blocks:
        parallelize_module(block, mesh, {**plan, "out": RowwiseParallel(), "down": RowwiseParallel()})


def gradients(model: Model) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters()}
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in found.items()}


def step(model: Model, group: dist.ProcessGroup, column: int, planner: str) -> Tensor:
    """Outputs at home, after a loss that the average over the group makes a sum. Tensor-parallel ranks share rows."""
    rank = dist.get_rank(group)
    cost = CostModel(hidden=WIDTH, num_heads=HEADS, flops_per_s=1e9)
    step = Balancer(cost, group=group, planner=planner).prepare(LENGTHS[column][rank])
    assert planner == "home" or step.plan.is_split.any()
    y = step.restore(model(step.route(rows_of(column, rank)), step.attention))
    (y.sin().sum() * dist.get_world_size(group)).backward()
    return y.detach()


def tensor_parallel(_rank: int, _world: int, shards: bool, planner: str) -> Any:
    """Axis 0 balances, and shards where it is wanted; axis 1 is tensor-parallel."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("balance", "tensor"))
    model = built()
    in_tensor_parallel(model, mesh["tensor"])
    checkpoint(model)
    if shards:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["balance"])
        fully_shard(model, mesh=mesh["balance"])
    group = mesh["balance"].get_group()
    y = step(model, group, 0, planner)
    found = gradients(model)
    if not shards:  # what FSDP does: the average over the ranks that hold other samples
        for x in found.values():
            dist.all_reduce(x, group=group)
            x.div_(2)
    return y, found


def hybrid(_rank: int, _world: int, planner: str) -> Any:
    """HSDP: each group of two ranks shards and balances by itself; replicas average gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = checkpoint(built())
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    y = step(model, mesh["shard"].get_group(), mesh["replicate"].get_local_rank(), planner)
    return y, gradients(model)


def one_process(groups: list[int]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs at home of each rank, and gradients of the sum of all losses."""
    model, outputs = built(), []
    for group in groups:
        for rank, lengths in enumerate(LENGTHS[group]):
            y = model(rows_of(group, rank), local_attention(lengths))
            y.sin().sum().backward()
            outputs.append(y.detach())
    return outputs, gradients(model)


def check(ranks: list[Any], homes: list[int], groups: list[int]) -> None:
    outputs, wanted = one_process(groups)
    scale = 1 / len(groups)  # replicas average what groups of their own have summed up
    for home, (y, found) in zip(homes, ranks, strict=True):
        torch.testing.assert_close(y, outputs[home], rtol=1e-10, atol=1e-10)
        for name, x in wanted.items():
            torch.testing.assert_close(found[name], scale * x, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("planner", ["ulysses", "moldable", "home"])
@pytest.mark.parametrize("shards", [False, True], ids=["tensor parallel", "and FSDP2"])
def test_balancing_beside_tensor_parallelism(shards: bool, planner: str) -> None:
    """With ``home`` two of the four ranks have no rows."""
    check(run_ranks(tensor_parallel, 4, shards, planner, timeout_s=100), homes=[0, 0, 1, 1], groups=[0])


@pytest.mark.parametrize("planner", ["ulysses", "home"])
def test_balancing_in_the_shards_of_replicas(planner: str) -> None:
    check(run_ranks(hybrid, 4, planner, timeout_s=100), homes=[0, 1, 2, 3], groups=[0, 1])


def test_the_comparison_sees_a_wrong_group() -> None:
    """Negative control: gradients of one group are not those of both."""
    with pytest.raises(AssertionError):
        check(run_ranks(tensor_parallel, 4, False, "ulysses", timeout_s=100), homes=[0, 0, 1, 1], groups=[0, 1])
