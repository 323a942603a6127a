"""The facade: a ``Balancer`` for the run, a ``Step`` for each batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from knapformer.errors import ConfigurationError, PlanError
from knapformer.execution.agreement import LocalInput, agree_on_plan, gather_inputs
from knapformer.execution.groups import BalancingGroup
from knapformer.execution.kernels import KERNELS
from knapformer.execution.telling import carried
from knapformer.execution.transport import Channel, Meter
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths, parse_local_lengths
from knapformer.given.topology import Topology
from knapformer.loops import joined
from knapformer.plans.micro_batches import MicroBatch, parse_micro_batches, split_micro_batches
from knapformer.plans.plan import Plan
from knapformer.plans.planners import check_lanes, make_plan
from knapformer.plans.problem import Caps, as_topology, cost_on, on_ranks
from knapformer.plans.registry import DEFAULT_EFFORT, check_effort
from knapformer.prefetch import Prefetch
from knapformer.step import Step
from knapformer.version import __version__

Planner = str | Callable[[Lengths], Plan]


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
        timeout: after which no rank waits any longer in any call of this balancer, forward or backward; None is the
            default group's own, as ``init_process_group`` was given it. On NCCL, where nothing ends a wait of the
            device, it is the timeout of the communicators that are made here, after which NCCL's watchdog ends the
            process; a ``group`` that is given keeps its own.
        lanes: 2 for steps whose ranks take turns between two lanes of sequences, so that one lane computes while the
            other's exchange is under way; ``"auto"`` for two where the cost model calls that faster. See
            ``knapformer.make_plan``.
        effort: how much ``moldable`` tries, ``"fast"``, ``"default"`` or ``"thorough"``; the same on all ranks.
        check_calls: compare which calls ranks make, and with what. Without it, ranks that differ by a mistake (in
            order, dtype, width, scale, or in what needs gradients) get wrong numbers, hang or abort without a word.

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
        lanes: int | str = 1,
        effort: str = DEFAULT_EFFORT,
        check_calls: bool = True,
    ) -> None:
        self.cost = CostModel() if cost is None else cost
        self.planner = planner
        self.topology, error = Topology(), None
        try:
            self.topology = as_topology(topology)
            _check_arguments(self.cost, planner, kernel)
            check_lanes(lanes)
            check_effort(effort)
        except ConfigurationError as wrong_argument:
            error = wrong_argument
        self.max_tokens_per_rank = max_tokens_per_rank
        self.num_kv_heads = num_kv_heads
        self.kernel, self.overlap, self.lanes, self.effort = kernel, overlap, lanes, effort
        self.group = BalancingGroup.create(group, self.topology.num_ranks or None, error, timeout)
        if check_calls:
            self.group = self.group.watched()
        self.check_calls = check_calls
        self.cost = on_ranks(cost_on(self.cost, self.topology), self.group.world_ranks)
        self.channel = Channel.over(self.group.data, self.group.rank, meter, self.group.calls)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around a step of the training loop, or the whole of it: tells the other ranks of an exception inside.

        Whatever it is, ``KeyboardInterrupt`` and ``SystemExit`` among them, it goes on on this rank. Ranks that wait
        for this one raise a ``RankError`` with its type and text, instead of one about a closed connection. An
        exception that all ranks raise ends nothing. Not a collective. Without ``check_calls`` it does nothing.
        """
        try:
            yield
        except BaseException as error:
            if self.group.calls is not None:
                self.group.calls.ended_by(error)
            raise

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
        return self._plan_step(self.group, local, self._fingerprint("prepare"))

    def _plan_step(self, group: BalancingGroup, local: LocalInput, fingerprint: Mapping[str, Any]) -> Step:
        """``prepare`` over ``group``, this balancer's ranks with any control group. Every rank of it calls this."""
        everywhere, rows = gather_inputs(group, local, fingerprint)
        (plan,) = self._agree(group, lambda: [everywhere])
        return Step(self, plan, everywhere, rows)

    def prefetch(
        self,
        loader: Any,
        lengths_of: Callable[[Any], Any],
        *,
        ahead: int = 2,
        conditioning_of: Callable[[Any], Mapping[str, Any]] | None = None,
        num_rows_of: Callable[[Any], int] | None = None,
        empty: Callable[[], Any] | None = None,
    ) -> Prefetch:
        """Steps that are loaded, agreed on and planned on a thread, while earlier ones run.

            for batch, step in balancer.prefetch(loader, lengths_of): ...

        Plans are those that ``prepare`` makes. Every rank of the balancing group calls it, at the same point of the
        program, and iterates over what it gives once an epoch: it has a process group of its own, so make it once. Its
        ``state_dict`` and ``load_state_dict`` resume in mid-epoch. A data set that draws from global random state
        should be read by the loader's workers: here its draws would fall between those of the loop.

        Args:
            loader: gives this rank's batches. Where it, or its batch sampler, has a ``state_dict``, so have the steps.
            lengths_of: of a batch what ``prepare`` takes as lengths; called on the thread.
            ahead: steps that are ready at most, beside the one that runs; the same on all ranks.
            conditioning_of: of a batch what ``prepare`` takes as ``conditioning``.
            num_rows_of: of a batch what ``prepare`` takes as ``num_rows``.
            empty: see ``join``; called on the thread.

        Raises:
            ConfigurationError: ``ahead`` is no integer of at least 1.
        """
        return Prefetch(
            self.group,
            self._plan_step,
            self._fingerprint,
            loader,
            lengths_of,
            ahead=ahead,
            conditioning_of=conditioning_of,
            num_rows_of=num_rows_of,
            empty=empty,
        )

    def join(self, loader: Any, *, empty: Callable[[], Any] | None = None) -> Iterator[Any]:
        """The batches of a loader, in a loop that ends on all ranks together, whatever their loaders' lengths.

            for batch in balancer.join(loader, empty=lambda: collate([])): ...

        Every rank of the balancing group iterates, makes the same calls for each batch, and leaves the loop (``break``)
        in the same step. One small gather a step, over the CPU group.

        Args:
            loader: gives this rank's batches.
            empty: makes a batch without samples. A rank whose loader has ended gets these until all have ended, so that
                every batch is trained on. Without it the loop ends before the first step for which some rank's loader
                has no batch. All ranks give it, or none.

        Raises:
            RankError: a loader or ``empty`` raised on some rank; on all ranks, naming it.
            DisagreementError: a rank makes another call instead; on all ranks.
        """
        method = "join" if empty is None else "join, with empty"
        return joined(self.group, lambda: self._fingerprint(method), loader, empty)

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
        everywhere, rows = gather_inputs(self.group, local, self._fingerprint("prepare_micro_batches", count))
        parts: list[MicroBatch] = []

        def split() -> list[Lengths]:
            parts.extend(split_micro_batches(everywhere, count, self.cost, self.max_tokens_per_rank))
            return [part.lengths for part in parts]

        plans = self._agree(self.group, split)
        return [
            MicroStep(
                Step(self, plan, part.lengths, {name: own[part.ids] for name, own in rows.items()}, i),
                part.of_rank(self.group.rank, everywhere).tolist(),
            )
            for i, (plan, part) in enumerate(zip(plans, parts, strict=True), start=1)
        ]

    def _agree(self, group: BalancingGroup, make_lengths: Callable[[], list[Lengths]]) -> list[Plan]:
        """Plan, and check that all ranks made the same plans. Every rank of the group calls it."""
        plans: list[Plan] = []
        digest, failure = None, None
        try:
            for lengths in make_lengths():
                plans.append(self.plan(lengths))
                if not plans[-1].places(lengths):
                    raise PlanError(f"the planner gave a plan for other lengths or ranks: {plans[-1]}")
            digest = hashlib.sha256(b"".join(plan.digest() for plan in plans)).digest()
        except (Exception, SystemExit) as planning_error:  # whatever it is, the other ranks wait
            failure = carried(planning_error)
        agree_on_plan(group, digest, failure)
        return plans

    def plan(self, lengths: Lengths) -> Plan:
        """The plan for the lengths of all ranks of the balancing group. Not a collective."""
        if callable(self.planner):
            return self.planner(lengths)
        return make_plan(
            lengths,
            planner=self.planner,
            topology=replace(self.topology, ranks_per_node=None),  # the cost model has them
            cost=self.cost,
            max_tokens_per_rank=self.max_tokens_per_rank,
            num_kv_heads=self.num_kv_heads,
            group_offset=self.group.offset,
            lanes=self.lanes,
            effort=self.effort,
        )

    def _fingerprint(self, method: str, num_micro_batches: int = 0) -> dict[str, Any]:
        """What must be the same on all ranks, as JSON."""
        kind = self.group.device.type
        planner = self.planner if isinstance(self.planner, str) else getattr(self.planner, "__qualname__", "callable")
        return {
            "version": __version__,
            "planner": planner,
            "topology": [str(self.topology), self.topology.ranks_per_node],
            "cost": self.cost.to_dict(),
            "max_tokens_per_rank": self.max_tokens_per_rank,
            "num_kv_heads": self.num_kv_heads,
            "lanes": self.lanes,
            "effort": self.effort,
            "group_size": self.group.size,
            "method": method,
            "micro_batches": num_micro_batches,
            "gradients_enabled": torch.is_grad_enabled(),
            "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None,
            "check_calls": self.check_calls,
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


def _check_arguments(cost: Any, planner: Any, kernel: Any) -> None:
    if not isinstance(cost, CostModel):
        raise ConfigurationError(f"cost must be a CostModel, got {cost!r}")
    if not isinstance(planner, str) and not callable(planner):
        raise ConfigurationError(f"planner must be a name or a function, got {planner!r}")
    if kernel not in ("auto", *KERNELS):
        raise ConfigurationError(f"unknown attention kernel {kernel!r}; known: auto, {', '.join(KERNELS)}")
