"""A step: what one rank does with its tensors under one plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from knapformer.errors import ConfigurationError, KnapFormerError
from knapformer.execution.agreement import compare_calls
from knapformer.execution.calls import StepCalls
from knapformer.execution.devices import outliving, to_device
from knapformer.execution.groups import BalancingGroup
from knapformer.execution.moves import Kind, Moves, Part
from knapformer.execution.rows import RowIndex, runs_of
from knapformer.execution.step_attention import LaneAttention, StepAttention
from knapformer.execution.transport import Channel
from knapformer.given.cost import CostModel
from knapformer.given.lengths import IntArray, Lengths
from knapformer.plans.evaluation import Evaluation, evaluate
from knapformer.plans.plan import Plan
from knapformer.schedules.meetings import links_of
from knapformer.schedules.tokens import RankTokens, window
from knapformer.streams import TEXT, VISUAL, StreamIndex


class Executor(Protocol):
    """What a step needs of its ``knapformer.Balancer``; tests and benchmarks have others.

    Attributes:
        cost: by which the plan is evaluated.
        group: this rank among the others, and the device of its tensors.
        channel: over which exchanges go.
        kernel, overlap: see ``knapformer.Balancer``.
    """

    cost: CostModel
    group: BalancingGroup
    channel: Channel
    kernel: str
    overlap: bool


class Routed(NamedTuple):
    """What ``Step.route_batch`` gives back: packed rows on this rank, as they were given."""

    tokens: list[Tensor]
    streams: dict[str, list[Tensor]]
    conditioning: list[Tensor]
    named: dict[str, list[Tensor]]


class Step:
    """One planned step on one rank; ``Balancer.prepare`` makes it.

    Local tokens are packed rows: lane after lane where the plan has two; in a lane whole sequences first, then parts of
    split ones, each by id; inside a sequence by position. Every rank of the balancing group calls the same exchanges in
    the same order; in each it waits only for ranks that have something for it.

    Attributes:
        plan: the plan, identical on every rank.
        lengths: the lengths of all ranks.
        rank: this rank in the balancing group.
        attention: of packed rows, for a model's ``attention`` argument; see
            ``knapformer.execution.step_attention.StepAttention``.
    """

    def __init__(
        self,
        balancer: Executor,
        plan: Plan,
        lengths: Lengths,
        conditioning_rows: Mapping[str, IntArray],
        micro_step: int = 0,
    ) -> None:
        self.plan, self.lengths, self.rank = plan, lengths, balancer.group.rank
        self._balancer, self._tokens = balancer, RankTokens.of(plan, self.rank)
        channel = balancer.channel
        self._calls = (
            None if channel.calls is None else StepCalls(channel.calls, micro_step, partial(links_of, plan, lengths))
        )
        self._moves = Moves(
            plan,
            lengths,
            self._tokens,
            self.rank,
            conditioning_rows=conditioning_rows,
            channel=channel,
            device=balancer.group.device,
            control=balancer.group.control,
            calls=self._calls,
        )
        self._device = balancer.group.device
        self.attention = StepAttention(
            tuple(
                LaneAttention(
                    plan,
                    self.rank,
                    lane,
                    channel=channel,
                    calls=self._calls,
                    kernel=balancer.kernel,
                    overlap=balancer.overlap,
                )
                for lane in range(plan.num_lanes)
            ),
            self.rank,
            self._calls,
        )
        self.attention.make(plan.num_heads, plan.num_kv_heads, self._device)

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
        with outliving():
            return StreamIndex.from_stream_ids(ids, device=self._device)

    @cached_property
    def evaluation(self) -> Evaluation:
        """What the plan costs, as the cost model predicts it."""
        return evaluate(self.plan, self._balancer.cost)

    def conditioning_lengths(self, name: str) -> list[int]:
        """Rows of ragged conditioning ``name`` of each local sequence, in packed order."""
        rows: list[int] = self._moves.conditioning_rows(name)[self.sequence_ids].tolist()
        return rows

    def route(self, *tensors: Tensor, stream: str | None = None, lengths: Any = None) -> Any:
        """Move tokens from home to the ranks that hold them: one all-to-all per dtype and width, differentiable.

        Args:
            tensors: (rows of this rank's sequences at home, …), any number, dtypes and trailing shapes. Every rank
                gives as many, of the same dtypes and trailing shapes. One that requires gradients on any rank has them
                on all that the step connects.
            stream: the tensors have the rows of this stream only.
            lengths: of the sequences that the rows are of, as ``prepare`` takes them, or of the stream alone. Where
                given they are compared with those that the step was prepared for: rows of [7, 5] are as many as of
                [5, 7].

        Returns:
            (packed rows on this rank, …) for each tensor; a single tensor for a single one.

        Raises:
            LengthsError: the rows are not those that the step was prepared for, on some rank; on all ranks.
            DisagreementError: ranks route other tensors, or call something else; on all ranks.
        """
        if lengths is not None:
            self.check_lengths(lengths, stream=stream)
        return self._move(tensors, ("tokens", stream), reverse=False)

    def route_batch(
        self,
        *,
        tokens: Sequence[Tensor] = (),
        streams: Mapping[str, Sequence[Tensor]] | None = None,
        conditioning: Sequence[Tensor] = (),
        named: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> Routed:
        """``route`` and ``route_conditioning`` for all inputs of a model at once.

        The ranks agree once, and all messages are under way at the same time. Every rank of the balancing group calls
        it, with the same streams and names in the same order.

        Args:
            tokens: as ``route`` takes them.
            streams: the same of each stream, by its name.
            conditioning: as ``route_conditioning`` takes it.
            named: ragged conditioning, by its name.

        Raises:
            ConfigurationError: nothing is given.
            LengthsError, DisagreementError: as ``route``; on all ranks.
        """
        given: list[Part] = [(list(own), ("tokens", name)) for name, own in (streams or {}).items()]
        given += [(list(own), ("conditioning", name)) for name, own in (named or {}).items()]
        given += [
            (list(own), (what, None)) for what, own in (("tokens", tokens), ("conditioning", conditioning)) if own
        ]
        given = given or [([], ("tokens", None))]  # which is an error
        moved = dict(zip((kind for _, kind in given), self._move_all(given, reverse=False), strict=True))
        return Routed(
            moved.get(("tokens", None), []),
            {name: moved["tokens", name] for name in streams or {}},
            moved.get(("conditioning", None), []),
            {name: moved["conditioning", name] for name in named or {}},
        )

    def restore(self, *tensors: Tensor, stream: str | None = None) -> Any:
        """Bring tokens home, in the original order: the inverse of ``route``, with the same arguments."""
        return self._move(tensors, ("tokens", stream), reverse=True)

    def check_lengths(
        self, lengths: Any, *, stream: str | None = None, conditioning: Mapping[str, Any] | None = None
    ) -> None:
        """Compare a batch with the one that the step was prepared for.

        Args:
            lengths: tokens of each of this rank's sequences, or a mapping of all streams.
            stream: the lengths are those of this stream.
            conditioning: rows of ragged conditioning of each sequence, by name.

        Raises:
            LengthsError: they differ.
        """
        try:
            self._moves.compare_lengths(lengths, stream, conditioning)
        except KnapFormerError as error:
            self._fail(error)
            raise

    def begin(self) -> None:
        """For ``knapformer.prefetch``: the step was made beside earlier ones, and its calls begin now."""
        if self._calls is not None:
            self._calls.begin()

    def check(self) -> None:
        """Compare the calls of all ranks up to here; every rank of the balancing group calls it, or none.

        ``prepare`` does so, too. On gloo no number of a call that ranks make differently is ever used; on NCCL messages
        carry no names, and a loop that calls this before the optimizer's step is told before the numbers are used. It
        waits for the other ranks' hosts, and for no device.

        Raises:
            DisagreementError: ranks have made different calls, forward or backward; on all ranks.
            KnapFormerError: what one rank has raised in a call; on all ranks.
        """
        compare_calls(self._balancer.group)

    def route_conditioning(self, *tensors: Tensor, name: str | None = None) -> Any:
        """Copy rows of each sequence to every rank that holds one of its tokens; gradients are summed at home.

        Args:
            tensors: (sequences at home, …), a row for each; with ``name``, as many rows for each sequence as
                ``prepare(conditioning={name: …})`` said.

        Returns:
            (local sequences, …) in packed order; with ``name``, all rows of those sequences.
        """
        return self._move(tensors, ("conditioning", name), reverse=False)

    def _move(self, tensors: Sequence[Tensor], kind: Kind, *, reverse: bool) -> Any:
        (moved,) = self._move_all([(tensors, kind)], reverse=reverse)
        return moved[0] if len(moved) == 1 else tuple(moved)

    def _move_all(self, parts: Sequence[Part], *, reverse: bool) -> list[list[Tensor]]:
        self._device = next((tensors[0].device for tensors, _ in parts if tensors), self._device)
        return self._moves.move(parts, reverse=reverse)

    def _fail(self, error: KnapFormerError) -> None:
        """Let those know that wait for this rank."""
        if self._calls is not None:
            self._calls.failed(error)
