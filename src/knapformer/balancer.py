"""The facade: a ``Balancer`` for the run, a ``Step`` for each batch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from knapformer.errors import ConfigurationError, LengthsError, PlanError
from knapformer.execution.attend import BalancedAttention, as_one_dtype
from knapformer.execution.devices import to_device
from knapformer.execution.exchange import finish, start
from knapformer.execution.groups import BalancingGroup, LocalInput, agree_on_plan, carried, gather_inputs
from knapformer.execution.kernels import KERNELS
from knapformer.execution.routes import AnyRoute, JointRoute, Route
from knapformer.execution.rows import RowIndex, runs_of
from knapformer.execution.transport import Channel, Meter
from knapformer.given.cost import CostModel
from knapformer.given.lengths import IntArray, Lengths, parse_local_lengths
from knapformer.given.topology import Topology
from knapformer.plans.micro_batches import MicroBatch, parse_micro_batches, split_micro_batches
from knapformer.plans.plan import Plan
from knapformer.plans.planners import Evaluation, evaluate, make_plan
from knapformer.plans.problem import Caps, as_topology
from knapformer.schedules.attention import attention_schedule
from knapformer.schedules.joint import JointExchange
from knapformer.schedules.tokens import Exchange, RankTokens, conditioning_exchange, token_exchange, window
from knapformer.streams import TEXT, VISUAL, StreamIndex
from knapformer.version import __version__

Planner = str | Callable[[Lengths], Plan]
Kind = tuple[str, str | None]
"""Tokens of a stream, or conditioning of a name."""


class Balancer:
    """Plans each step of a balancing group of ranks. It keeps no state of a step.

    Every rank of ``group`` makes one, with the same arguments, at the same point of the program.

    Args:
        cost: what lengths cost; by default FLUX.1's width on the default machine. See ``knapformer.given.cost``.
        planner: name of a planner, or a function from ``Lengths`` to ``Plan`` that gives the same on every rank.
        topology: bags such as ``"g1n2+g2n1"``. Where the group is a multiple of the bags' total, consecutive ranks
            form independent balancing groups.
        group: ranks that exchange tokens; by default those of the default group, on CUDA over a communicator of their
            own. They need not be the ranks of FSDP. A group that is given is used as it is: best not one of FSDP's.
        max_tokens_per_rank: cap on the tokens that a rank holds; see ``knapformer.make_plan``.
        num_kv_heads: key and value heads, where they are fewer than ``cost.num_heads``.
        kernel: attention kernel; see ``knapformer.execution.kernels.varlen_attention``.
        overlap: compute whole sequences' attention while the others' q, k and v are in flight.
        meter: counts time and bytes in exchanges.
        timeout: after which a rank gives up waiting for another one's lengths or tokens. None is the backend's default
            (30 minutes on gloo, 10 on NCCL), whatever ``init_process_group`` was given.

    Raises:
        ConfigurationError: arguments that do not fit each other or the group; on all ranks.
        DisagreementError: ranks have topologies for other numbers of ranks; on all ranks.
    """

    def __init__(
        self,
        cost: CostModel | None = None,
        *,
        planner: Planner = "moldable",
        topology: Topology | str | None = None,
        group: dist.ProcessGroup | None = None,
        max_tokens_per_rank: Caps = "auto",
        num_kv_heads: int | None = None,
        kernel: str = "auto",
        overlap: bool = True,
        meter: Meter | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.cost = CostModel() if cost is None else cost
        self.planner = planner
        self.topology, error = Topology(), None
        try:
            self.topology = as_topology(topology)
            _check_arguments(self.cost, planner, kernel)
        except ConfigurationError as wrong_argument:
            error = wrong_argument
        self.max_tokens_per_rank = max_tokens_per_rank
        self.num_kv_heads = num_kv_heads
        self.kernel, self.overlap = kernel, overlap
        self.group = BalancingGroup.create(group, self.topology.num_ranks or None, error, timeout)
        self.channel = Channel.over(self.group.data, self.group.rank, meter)

    def prepare(
        self,
        lengths: Any,
        *,
        num_rows: int | None = None,
        error: BaseException | None = None,
        conditioning: Mapping[str, Any] | None = None,
    ) -> Step:
        """Exchange lengths and plan a step. Every rank of the balancing group calls it, once per step.

        Args:
            lengths: tokens of each sequence that this rank loaded, in order; or a mapping of stream names to such
                lists (``{"text": […], "visual": […]}``), stored in that order inside each sequence.
            num_rows: rows of this rank's packed tensors; where given, the lengths must sum to it.
            error: what went wrong on this rank while it loaded its batch; then ``lengths`` may be anything.
            conditioning: rows of ragged conditioning of each sequence, by name; see ``Step.route_conditioning``.

        Returns:
            The step.

        Raises:
            LengthsError, ConfigurationError, CapacityError, RankError, DisagreementError: a bad input on one rank,
                naming it; the same on all ranks, before any token moves.
        """
        local = LocalInput.collect(lambda: parse_local_lengths(lengths), num_rows, error, conditioning)
        everywhere, rows = gather_inputs(self.group, local, self._fingerprint())
        (plan,) = self._agree(lambda: [everywhere])
        return Step(self, plan, everywhere, rows)

    def prepare_micro_batches(
        self,
        micro_batches: Sequence[Any],
        *,
        error: BaseException | None = None,
        conditioning: Mapping[str, Any] | None = None,
    ) -> list[MicroStep]:
        """Plan an optimizer step that accumulates gradients over several micro-steps, all of them at once.

        Sequences are dealt out anew over the micro-steps, so that these take equally long; each runs in one of them, so
        the gradients of the whole step are the same. Every rank of the balancing group calls it, with as many
        micro-batches.

        Args:
            micro_batches: of each micro-batch that this rank loaded, what ``prepare`` takes as ``lengths``.
            error: as in ``prepare``; then ``micro_batches`` may be anything.
            conditioning: as in ``prepare``, for the sequences of all micro-batches one after another.

        Returns:
            For each micro-step the step and which of this rank's sequences run in it.

        Raises:
            LengthsError, ConfigurationError, CapacityError, RankError, DisagreementError: as ``prepare``.
        """
        local = LocalInput.collect(lambda: parse_micro_batches(micro_batches), None, error, conditioning)
        count = len(micro_batches) if isinstance(micro_batches, Sequence) else 0
        everywhere, rows = gather_inputs(self.group, local, {**self._fingerprint(), "micro_batches": count})
        parts: list[MicroBatch] = []

        def split() -> list[Lengths]:
            parts.extend(split_micro_batches(everywhere, count, self.cost, self.max_tokens_per_rank))
            return [part.lengths for part in parts]

        plans = self._agree(split)
        return [
            MicroStep(
                Step(self, plan, part.lengths, {name: own[part.ids] for name, own in rows.items()}),
                part.of_rank(self.group.rank, everywhere).tolist(),
            )
            for plan, part in zip(plans, parts, strict=True)
        ]

    def _agree(self, make_lengths: Callable[[], list[Lengths]]) -> list[Plan]:
        """Plan, and check that all ranks made the same plans. Every rank of the group calls it."""
        plans: list[Plan] = []
        digest, failure = None, None
        try:
            for lengths in make_lengths():
                plans.append(self.plan(lengths))
                if not plans[-1].places(lengths):
                    raise PlanError(f"the planner gave a plan for other lengths or ranks: {plans[-1]}")
            digest = hashlib.sha256(b"".join(plan.digest() for plan in plans)).digest()
        except Exception as planning_error:  # whatever it is, the other ranks wait
            failure = carried(planning_error)
        agree_on_plan(self.group, digest, failure)
        return plans

    def plan(self, lengths: Lengths) -> Plan:
        """The plan for the lengths of all ranks of the balancing group. Not a collective."""
        if callable(self.planner):
            return self.planner(lengths)
        return make_plan(
            lengths,
            planner=self.planner,
            topology=self.topology,
            cost=self.cost,
            max_tokens_per_rank=self.max_tokens_per_rank,
            num_kv_heads=self.num_kv_heads,
            group_offset=self.group.offset,
        )

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same on all ranks, as JSON."""
        planner = self.planner if isinstance(self.planner, str) else getattr(self.planner, "__qualname__", "callable")
        return {
            "version": __version__,
            "planner": planner,
            "topology": [str(self.topology), self.topology.ranks_per_node],
            "cost": self.cost.to_dict(),
            "max_tokens_per_rank": self.max_tokens_per_rank,
            "num_kv_heads": self.num_kv_heads,
            "group_size": self.group.size,
        }


class MicroStep(NamedTuple):
    """One micro-step of an optimizer step.

    Attributes:
        step: what to route, run and restore with; it knows this micro-step's sequences only.
        sequences: which of this rank's sequences run here, as positions among those of all its micro-batches one after
            another; their rows, in this order, are what ``step.route`` takes.
    """

    step: Step
    sequences: list[int]


class Step:
    """One planned step on one rank; ``Balancer.prepare`` makes it.

    Local tokens are packed rows: whole sequences first, then parts of split ones, each by id; inside a sequence by
    position. Every rank of the balancing group calls the same exchanges in the same order; in each it waits only for
    ranks that have something for it.

    Attributes:
        plan: the plan, identical on every rank.
        lengths: the lengths of all ranks.
        rank: this rank in the balancing group.
    """

    def __init__(self, balancer: Balancer, plan: Plan, lengths: Lengths, conditioning_rows: Mapping[str, IntArray]):
        self.plan, self.lengths, self.rank = plan, lengths, balancer.group.rank
        self._balancer, self._rows = balancer, dict(conditioning_rows)
        self._tokens = RankTokens.of(plan, self.rank)
        self._schedules: dict[Kind, Exchange] = {}
        self._routes: dict[Any, AnyRoute] = {}
        self._attentions: dict[Any, BalancedAttention] = {}
        self._device = balancer.group.device
        self._attention(plan.num_heads, plan.num_kv_heads, self._device)

    @property
    def num_ranks(self) -> int:
        """Ranks of the balancing group."""
        return self.plan.world_size

    @property
    def num_tokens(self) -> int:
        """Packed rows on this rank."""
        return self._tokens.num_rows

    @property
    def sequence_ids(self) -> IntArray:
        """(S_local,) ids of the sequences of which this rank holds a token, in packed order."""
        return self._tokens.sequence_ids

    @property
    def local_lengths(self) -> IntArray:
        """(S_local,) tokens of each of them on this rank."""
        return self._tokens.sequence_tokens

    @cached_property
    def sequence_index(self) -> Tensor:
        """(T,) int64: for each packed row, the row of ``route_conditioning``'s result that is its sequence's.

        On the device of the tensors that were routed.
        """
        index = np.repeat(np.arange(len(self.sequence_ids)), self.local_lengths)
        return to_device(index, self._device)

    @cached_property
    def row_index(self) -> RowIndex:
        """``sequence_index`` with what the host knows of it, which saves the models copies of rows."""
        return RowIndex(self.sequence_index, runs_of(self.local_lengths))

    @cached_property
    def streams(self) -> StreamIndex:
        """Which packed rows are text and which are visual, for lengths with streams of these names.

        On the device of the tensors that were routed.
        """
        kinds = {"text": TEXT, "visual": VISUAL}
        names = [name for name, _ in self.lengths.streams]
        if not set(names) <= set(kinds) or not names:
            raise ConfigurationError(f"needs lengths with streams 'text' and 'visual', got {names}")
        tokens, counts = self._tokens, []
        for name in names:
            low, high = window(self.lengths, name)
            start, end = np.maximum(tokens.start, low[tokens.sequence]), np.minimum(tokens.end, high[tokens.sequence])
            counts.append(np.maximum(end - start, 0))
        pattern = np.tile([kinds[name] for name in names], len(tokens.sequence))
        ids = np.repeat(pattern, np.stack(counts, axis=1).ravel())
        return StreamIndex.from_stream_ids(ids, device=self._device)

    @cached_property
    def evaluation(self) -> Evaluation:
        """What the plan costs, as the cost model predicts it."""
        return evaluate(self.plan, self._balancer.cost)

    def conditioning_lengths(self, name: str) -> list[int]:
        """Rows of ragged conditioning ``name`` of each local sequence, in packed order."""
        rows: list[int] = self._conditioning_rows(name)[self.sequence_ids].tolist()
        return rows

    def route(self, *tensors: Tensor, stream: str | None = None) -> Any:
        """Move tokens from home to the ranks that hold them: one all-to-all per dtype and width, differentiable.

        Args:
            tensors: (rows of this rank's sequences at home, …), any number, dtypes and trailing shapes. Every rank
                gives as many, of the same dtypes and trailing shapes, and the same of them requiring gradients.
            stream: the tensors have the rows of this stream only.

        Returns:
            (packed rows on this rank, …) for each tensor; a single tensor for a single one.

        Raises:
            LengthsError: the rows are not those of the lengths. Give ``num_rows`` to ``prepare`` for all ranks to know.
        """
        return self._exchange(tensors, ("tokens", stream), reverse=False)

    def restore(self, *tensors: Tensor, stream: str | None = None) -> Any:
        """Bring tokens home, in the original order: the inverse of ``route``, with the same arguments."""
        return self._exchange(tensors, ("tokens", stream), reverse=True)

    def route_conditioning(self, *tensors: Tensor, name: str | None = None) -> Any:
        """Copy rows of each sequence to every rank that holds one of its tokens; gradients are summed at home.

        Args:
            tensors: (sequences at home, …), a row for each; with ``name``, as many rows for each sequence as
                ``prepare(conditioning={name: …})`` said.

        Returns:
            (local sequences, …) in packed order; with ``name``, all rows of those sequences.
        """
        return self._exchange(tensors, ("conditioning", name), reverse=False)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False) -> Tensor:
        """Attention of each sequence to itself, wherever its tokens are. Every rank calls it for every layer.

        Args:
            q: (T, H, D) packed rows; k, v: (T, Hkv, D). Heads other than the plan's get the plan's shares. Under
                autocast they are cast to its dtype first.
            scale: of the scores; None means 1/√D.
            causal: a query sees keys up to its own position.

        Returns:
            (T, H, D).

        Raises:
            LengthsError: the rows are not those of the plan.
            ConfigurationError: several dtypes, or causal attention under a plan with tiles of part of the queries.
        """
        q, k, v = as_one_dtype(q, k, v)
        attention = self._attention(q.shape[1], k.shape[1], q.device)
        return attention(q, k, v, scale=scale, causal=causal)

    def _attention(self, num_heads: int, num_kv_heads: int, device: torch.device) -> BalancedAttention:
        """For all layers with these heads. Those of the cost model are made with the step, others when first used."""
        key = (num_heads, num_kv_heads, device)
        if key not in self._attentions:
            balancer = self._balancer
            self._attentions[key] = BalancedAttention(
                attention_schedule(self.plan, self._tokens, self.rank, num_heads, num_kv_heads),
                balancer.channel,
                device,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                kernel=balancer.kernel,
                overlap=balancer.overlap,
            )
        return self._attentions[key]

    def _exchange(self, tensors: Sequence[Tensor], kind: Kind, *, reverse: bool) -> Any:
        if not tensors:
            raise ConfigurationError("expected at least one tensor")
        self._device = tensors[0].device
        rows = [self._as_rows(x, kind, reverse) for x in tensors]
        alike: dict[Any, list[int]] = {}
        for i, x in enumerate(rows):
            alike.setdefault((x.dtype, x.shape[1], x.device), []).append(i)
        pending = []
        for (_, _, device), chosen in alike.items():
            route = self._route(kind, device, reverse, len(chosen))
            pending.append(start([rows[i] for i in chosen], route, self._balancer.channel))
        outputs: list[Tensor | None] = [None] * len(tensors)
        for chosen, flight in zip(alike.values(), pending, strict=True):
            for i, y in zip(chosen, finish(flight), strict=True):
                outputs[i] = y.view(y.shape[0], *tensors[i].shape[1:])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _as_rows(self, x: Tensor, kind: Kind, reverse: bool) -> Tensor:
        """(units, width)."""
        schedule = self._schedule(kind)
        wanted = schedule.num_out if reverse else schedule.num_in
        if x.dim() == 0 or x.shape[0] != wanted:
            raise LengthsError(f"rank {self.rank}: expected a tensor of {wanted} rows, got shape {tuple(x.shape)}")
        return x.reshape(x.shape[0], math.prod(x.shape[1:]))

    def _route(self, kind: Kind, device: torch.device, reverse: bool, num_tensors: int) -> AnyRoute:
        """Made once; for several tensors at once they share one buffer."""
        if (kind, device, num_tensors) not in self._routes:
            schedule = self._schedule(kind)
            self._routes[kind, device, num_tensors] = (
                Route.of(schedule, device)
                if num_tensors == 1
                else JointRoute.of(JointExchange.of([schedule] * num_tensors), device)
            )
        route = self._routes[kind, device, num_tensors]
        return route.reversed if reverse else route

    def _schedule(self, kind: Kind) -> Exchange:
        if kind not in self._schedules:
            where, (what, name) = (self.plan, self.lengths, self._tokens, self.rank), kind
            self._schedules[kind] = (
                token_exchange(*where, stream=name)
                if what == "tokens"
                else conditioning_exchange(*where, rows=None if name is None else self._conditioning_rows(name))
            )
        return self._schedules[kind]

    def _conditioning_rows(self, name: str) -> IntArray:
        if name not in self._rows:
            raise ConfigurationError(f"no conditioning {name!r}: prepare was told of {sorted(self._rows)}")
        return self._rows[name]


def _check_arguments(cost: Any, planner: Any, kernel: Any) -> None:
    if not isinstance(cost, CostModel):
        raise ConfigurationError(f"cost must be a CostModel, got {cost!r}")
    if not isinstance(planner, str) and not callable(planner):
        raise ConfigurationError(f"planner must be a name or a function, got {planner!r}")
    if kernel not in ("auto", *KERNELS):
        raise ConfigurationError(f"unknown attention kernel {kernel!r}; known: auto, {', '.join(KERNELS)}")
