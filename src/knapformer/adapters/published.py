"""The interface of the published KnapFormer package (arXiv 2508.06001), over our own plan and exchange.

Code that was written for it runs unchanged, and ranks without sequences or without chunks are no error. Rows travel as
bytes of their own dtype. For new code, ``knapformer.Balancer`` does more: uneven shares, any number of heads, plans
without fixed bags.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from knapformer.adapters.routing_plan import (
    ATTENTION_FLOPS,
    LINEAR_FLOPS,
    RoutingPlan,
    split_evenly,
)
from knapformer.errors import ConfigurationError, KnapFormerError, LengthsError
from knapformer.execution.agreement import LocalInput, agree_on_plan, begin_step, gather_inputs
from knapformer.execution.calls import StepCalls
from knapformer.execution.devices import to_device
from knapformer.execution.exchange import finish, start
from knapformer.execution.groups import BalancingGroup, subgroup
from knapformer.execution.routes import AnyRoute, Route
from knapformer.execution.transport import Channel
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths, parse_local_lengths
from knapformer.given.topology import Topology
from knapformer.plans.plan import Plan
from knapformer.plans.planners import make_plan
from knapformer.schedules.meetings import links_of
from knapformer.schedules.tokens import Blocks, RankTokens, make_exchange, starts_of, token_exchange
from knapformer.version import __version__

OTHER_MODULE = "sequence_balancer.py"
"""A module that the published package has and this one has not."""


class SequenceBalancer:
    """Balances sequences over fixed bags of ranks. Every rank makes one, at the same point of the program.

    What a plan holds can also be read as attributes: ``gpu_id2seq_lens``, ``seq_id2assigned_bag_id`` and so on; see
    ``knapformer.adapters.routing_plan.RoutingPlan``.

    Args:
        bag_specs: bags such as ``"g1n2+g2n1"``. A world that is a multiple of their total has independent balancing
            groups of consecutive ranks.
        gamma: time per attention FLOP over time per linear-phase FLOP.

    Attributes:
        this_gpu_id: this world rank.
        balance_process_group: the ranks of the balancing group.
        tracked_tflops, tracked_imbalances, tracked_balance_imbalances: for each ``plan_routing`` since tracking was
            turned on: TFLOPs of the step, and most over mean work of a rank without and with balancing.
        metrics: the last plan's imbalances.

    Calls are compared as those of ``knapformer.Balancer`` are: ranks that differ in order, dtype, width or in what
    needs gradients are told so.

    Raises:
        ConfigurationError: bags that cannot be read, or do not fit the world; on all ranks.
        DisagreementError: ranks have other bags; on all ranks.
    """

    def __init__(self, bag_specs: str, gamma: float = 1.0) -> None:
        topology, error = Topology(), None
        try:
            topology = Topology.parse(bag_specs)
        except ConfigurationError as wrong_bags:
            error = wrong_bags
        self.topology, self.gamma = topology, gamma
        self.group = BalancingGroup.create(None, topology.num_ranks, error, configuration={"bags": str(topology)})
        self.group = self.group.watched()
        self.this_gpu_id = self.group.offset + self.group.rank
        self.balance_process_group = self.group.data
        starts = [sum(self.topology.bag_sizes[:i]) for i in range(len(self.topology.bag_sizes) + 1)]
        self._bag = next(i for i, end in enumerate(starts[1:]) if self.group.rank < end)
        self._bag_ranks = range(starts[self._bag], starts[self._bag + 1])
        self._bag_group = self._make_bag_group().watched()
        self._channel = Channel.over(self.group.data, self.group.rank, calls=self.group.calls)
        self._bag_channel = Channel.over(self._bag_group.data, self._bag_group.rank, calls=self._bag_group.calls)
        self._step: _Step | None = None
        self.turn_off_tracking()
        self.tracked_tflops: list[float] = []
        self.tracked_imbalances: list[float] = []
        self.tracked_balance_imbalances: list[float] = []
        self.metrics: dict[str, float] = {}

    def plan_routing(self, local_seq_lens: Sequence[int] | Tensor, token_dim: int) -> None:
        """Plan a step. Every rank of the balancing group calls it.

        Args:
            local_seq_lens: tokens of each sequence that this rank loaded.
            token_dim: channels of a token.

        Raises:
            LengthsError, ConfigurationError: lengths of a rank are none, or a width is; on all ranks.
            DisagreementError: ranks have made other calls since the last one; on all ranks.
        """
        plan, lengths = self._plan(local_seq_lens, token_dim)
        routing = RoutingPlan.of(plan, lengths, self.topology, gamma=self.gamma, width=token_dim)
        begin_step(self._bag_group, {})
        self._step = _Step(self.group, self._bag_group, plan, lengths, routing)
        before, after = routing.imbalance()
        self.metrics = {"imbalance": before, "balance_imbalance": after}
        if self._tracked_layers:
            flops = sum(
                LINEAR_FLOPS * n * token_dim**2 + ATTENTION_FLOPS * n * n * token_dim for n in lengths.tokens.tolist()
            )
            self.tracked_tflops.append(flops * self._tracked_layers / 1e12)
            self.tracked_imbalances.append(before)
            self.tracked_balance_imbalances.append(after)

    def route(
        self,
        packed_seqs: Tensor,
        packed_features: Sequence[Tensor] | None = None,
        force_fp32_buffer: bool = False,
    ) -> tuple[list[int], Tensor, list[Tensor] | None]:
        """Move rows from home to the bags. Every rank of the balancing group calls it.

        Args:
            packed_seqs: (T, C) rows of this rank's sequences, one after another.
            packed_features: more tensors of T rows, each moved in its own dtype.
            force_fp32_buffer: nothing; no dtype is converted.

        Returns:
            Lengths of this rank's chunks, their rows by chunk id, and the features' rows.
        """
        rows, features = self._move(packed_seqs, packed_features, reverse=False)
        return list(self._current.routing.gpu_id2chunk_lens[self.this_gpu_id]), rows, features

    def reverse_route(
        self,
        packed_seqs: Tensor,
        packed_features: Sequence[Tensor] | None = None,
        force_fp32_buffer: bool = False,
    ) -> tuple[list[int], Tensor, list[Tensor] | None]:
        """Bring rows home: the inverse of ``route``.

        Returns:
            Lengths of this rank's sequences, their rows in the original order, and the features' rows.
        """
        rows, features = self._move(packed_seqs, packed_features, reverse=True)
        return list(self._current.routing.gpu_id2seq_lens[self.this_gpu_id]), rows, features

    def pre_attn(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Own chunks and all heads to the bag's full sequences and a share of the heads.

        Every rank of the bag calls it; a bag of one rank passes its input through, and need not.

        Args:
            q, k, v: (T, heads, D) rows of this rank's chunks.

        Returns:
            Lengths (S_bag,) int32 of the bag's sequences by id, and q, k, v (rows of all of them, heads / ranks, D).

        Raises:
            ConfigurationError: heads that cannot be divided over the bag.
        """
        lengths = [sum(chunks) for chunks in self._current.routing.chunk_table(self._bag)]
        q, k, v = self._exchange_heads((q, k, v), reverse=False)
        return self._int32(lengths, q), q, k, v

    def post_attn(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Attention's output back to own chunks and all heads: the inverse of ``pre_attn``.

        Args:
            x: (rows of the bag's sequences, heads / ranks, D).

        Returns:
            Lengths int32 of this rank's chunks, and x (T, heads, D).
        """
        lengths = self._current.routing.gpu_id2chunk_lens[self.this_gpu_id]
        (x,) = self._exchange_heads((x,), reverse=True)
        return self._int32(lengths, x), x

    def get_routing_plan_summary(self) -> dict[str, Any]:
        """The last plan as a dictionary."""
        return self._current.routing.to_dict()

    def nice_print(self) -> None:
        """Print who holds what, on the first rank of the balancing group."""
        routing = self._current.routing
        if self.group.rank == 0:
            for gpu in routing.balance_gpu_ids:
                print(
                    f"GPU {gpu} (bag {routing.gpu_id2bag_id[gpu]}): loads {routing.gpu_id2seq_lens[gpu]}, "
                    f"holds {routing.gpu_id2chunk_lens[gpu]} of sequences "
                    f"{[routing.chunk_id2seq_id[chunk] for chunk in routing.gpu_id2chunk_ids[gpu]]}"
                )

    def print_imbalance(self) -> None:
        """Print the most work of a rank over the mean, on the first rank of the balancing group."""
        before, after = self._current.routing.imbalance()
        if self.group.rank == 0:
            print(f"most over mean work per GPU: {before:.3f} without balancing, {after:.3f} with")

    def turn_on_tracking(self, num_layers: int, include_bwd: bool) -> None:
        """Append to the ``tracked_`` lists in each ``plan_routing`` from now on.

        Args:
            num_layers: of the model.
            include_bwd: count the backward pass as twice the forward pass.
        """
        self._tracked_layers = num_layers * (3 if include_bwd else 1)

    def turn_off_tracking(self) -> None:
        """Stop appending."""
        self._tracked_layers = 0

    def print_tracking_results(self) -> None:
        """Print means over the tracked steps, on the first rank of the balancing group."""
        if self.group.rank == 0 and self.tracked_tflops:
            count = len(self.tracked_tflops)
            before, after = sum(self.tracked_imbalances) / count, sum(self.tracked_balance_imbalances) / count
            print(
                f"{count} steps: {sum(self.tracked_tflops):.4g} TFLOPs, most over mean work per GPU {before:.3f} "
                f"without balancing, {after:.3f} with"
            )

    def __getattr__(self, name: str) -> Any:
        step = self.__dict__.get("_step")
        if step is not None and name in RoutingPlan.__dataclass_fields__:
            return getattr(step.routing, name)
        hint = "; call plan_routing first" if name in RoutingPlan.__dataclass_fields__ else ""
        raise AttributeError(f"SequenceBalancer has no attribute {name!r}{hint}")

    @property
    def _current(self) -> _Step:
        if self._step is None:
            raise ConfigurationError("there is no plan; call plan_routing first")
        return self._step

    def _make_bag_group(self) -> BalancingGroup:
        """A group of the bag's own: bags of one rank issue no collective, and callers may skip theirs.

        Every rank of the world calls it.
        """
        rank, size, offset = self.group.rank - self._bag_ranks.start, len(self._bag_ranks), self._bag_ranks.start
        data = control = None
        if dist.is_initialized():
            sizes = self.topology.bag_sizes * (dist.get_world_size() // self.topology.num_ranks)
            parts = [range(end - n, end) for n, end in zip(sizes, accumulate(sizes), strict=True)]
            assert dist.group.WORLD is not None
            data = subgroup(dist.group.WORLD, parts, timeout=self.group.timeout)
            control = subgroup(dist.group.WORLD, parts, "gloo", self.group.timeout)
        if size == 1:
            data = control = None
        return BalancingGroup(data, control, rank, size, offset, self.group.device, self.group.timeout)

    def _plan(self, local_seq_lens: Any, token_dim: int) -> tuple[Plan, Lengths]:
        configuration = {"version": __version__, "bags": str(self.topology), "gamma": self.gamma, "width": token_dim}
        try:
            cost = CostModel(hidden=token_dim, num_heads=max(self.topology.bag_sizes), gamma=self.gamma)
            local = LocalInput(parse_local_lengths(local_seq_lens), {})
        except KnapFormerError as error:
            local = LocalInput({}, {}, error)
        lengths, _ = gather_inputs(self.group, local, configuration)
        plan = make_plan(lengths, planner="bags", topology=self.topology, cost=cost, group_offset=self.group.offset)
        agree_on_plan(self.group, plan.digest(), None)
        return plan, lengths

    def _move(
        self, rows: Tensor, features: Sequence[Tensor] | None, *, reverse: bool
    ) -> tuple[Tensor, list[Tensor] | None]:
        """One all-to-all for each tensor, all of them under way at once."""
        tensors, step = [rows, *(features or [])], self._current
        routes, what = [step.route(x, reverse) for x in tensors], "reverse_route" if reverse else "route"
        pending = [
            start([x.reshape(len(x), _width(x))], route, self._channel, step.calls, what)
            for x, route in zip(tensors, routes, strict=True)
        ]
        moved = [finish(p)[0].view(-1, *x.shape[1:]) for p, x in zip(pending, tensors, strict=True)]
        return moved[0], None if features is None else moved[1:]

    def _exchange_heads(self, tensors: Sequence[Tensor], *, reverse: bool) -> tuple[Tensor, ...]:
        """(T, heads, D) to (rows of the bag, heads / ranks, D), or back, all tensors at once."""
        num_ranks = len(self._bag_ranks)
        if num_ranks == 1:
            return tuple(tensors)
        pending, step, what = [], self._current, "post_attn" if reverse else "pre_attn"
        for x in tensors:
            heads = x.shape[1] if reverse else split_evenly(x.shape[1], num_ranks)
            forward = step.head_route(self._bag, self._bag_channel.rank, heads, x.device)
            route = forward.reversed if reverse else forward
            rows, units = route.num_in // x.shape[1], (x.shape[0] * x.shape[1], x.shape[2])
            if len(x) != rows:
                wrong = f"rank {self.this_gpu_id}: expected {rows} rows of attention, got {tuple(x.shape)}"
                raise told(step.bag_calls, LengthsError(wrong))
            pending.append(start([x.reshape(units)], route, self._bag_channel, step.bag_calls, what))
        heads_after = [x.shape[1] * num_ranks if reverse else x.shape[1] // num_ranks for x in tensors]
        return tuple(
            finish(p)[0].view(-1, n, x.shape[2]) for p, n, x in zip(pending, heads_after, tensors, strict=True)
        )

    @staticmethod
    def _int32(lengths: Sequence[int], like: Tensor) -> Tensor:
        return to_device(torch.tensor(lengths, dtype=torch.int32), like.device)


class _Step:
    """One plan, and the routes that were made for it."""

    def __init__(
        self, group: BalancingGroup, bag: BalancingGroup, plan: Plan, lengths: Lengths, routing: RoutingPlan
    ) -> None:
        self.rank, self.plan, self.lengths, self.routing = group.rank, plan, lengths, routing
        everyone = np.zeros(bag.size, np.int64), np.arange(bag.size)
        self.calls = None if group.calls is None else StepCalls(group.calls, 0, partial(links_of, plan, lengths))
        self.bag_calls = None if bag.calls is None else StepCalls(bag.calls, 0, lambda: everyone)
        self._routes: dict[Any, Route] = {}

    def route(self, x: Tensor, reverse: bool) -> AnyRoute:
        """Of rows: home order to chunks by id."""
        key = ("rows", x.device)
        if key not in self._routes:
            own = self.plan.segment_rank == self.rank
            plan = self.plan
            tokens = RankTokens(plan.segment_sequence[own], plan.segment_start[own], plan.segment_end[own], num_whole=0)
            self._routes[key] = Route.of(token_exchange(self.plan, self.lengths, tokens, self.rank), x.device)
        route = self._routes[key].reversed if reverse else self._routes[key]
        if x.shape[0] != route.num_in:
            wrong = f"rank {self.rank}: expected {route.num_in} rows, got shape {tuple(x.shape)}"
            raise told(self.calls, LengthsError(wrong))
        return route

    def head_route(self, bag: int, rank: int, heads: int, device: torch.device) -> Route:
        """Of heads of tokens inside a bag; ``rank`` is that in the bag, ``heads`` are those of each rank."""
        key = ("heads", heads, device)
        if key not in self._routes:
            num_ranks = len(self.routing.bag_id2gpu_ids[bag])
            sizes = np.asarray(self.routing.chunk_table(bag), np.int64).reshape(-1, num_ranks)
            own_rows, ranks = int(sizes[:, rank].sum()), np.arange(num_ranks)
            schedule = make_exchange(
                rank,
                send=Blocks.of(ranks * heads, own_rows, heads * num_ranks, heads, 1),
                destination=ranks,
                # The bag's sequences lie chunk after chunk; a chunk comes from its own rank.
                receive=Blocks.of_rows(starts_of(sizes.ravel()) * heads, sizes.ravel() * heads),
                source=np.tile(ranks, len(sizes)),
                num_in=own_rows * heads * num_ranks,
                is_local=num_ranks == 1,
            )
            self._routes[key] = Route.of(schedule, device)
        return self._routes[key]


def told(calls: StepCalls | None, error: KnapFormerError) -> KnapFormerError:
    """The error, of which the ranks that wait for this one are told."""
    if calls is not None:
        calls.failed(error)
    return error


def _width(x: Tensor) -> int:
    """Elements of one row, with no row too."""
    return int(torch.Size(x.shape[1:]).numel())


def _warn_of_other_package() -> None:
    """Say so where the published package is installed as well: both are imported as ``knapformer``."""
    beside = (Path(__file__).parents[1] / OTHER_MODULE).exists()
    others = [
        found
        for found in metadata.distributions(name="knapformer")
        if any(file.as_posix() == f"knapformer/{OTHER_MODULE}" for file in found.files or [])
    ]
    if beside or others:
        where = ", ".join(f"{found.metadata['Name']} {found.version}" for found in others) or "its files"
        warnings.warn(
            f"another package named knapformer is installed too ({where}); this is {Path(__file__).parents[1]}, "
            f"version {__version__}. Uninstall one of them: which of the two is imported depends on the search path",
            stacklevel=2,
        )


_warn_of_other_package()
