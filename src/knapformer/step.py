"""A step: what one rank does with its tensors under one plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from knapformer.errors import ConfigurationError, LengthsError
from knapformer.execution.attend import BalancedAttention, as_one_dtype, check_heads
from knapformer.execution.devices import outliving, to_device
from knapformer.execution.exchange import finish, start
from knapformer.execution.groups import BalancingGroup
from knapformer.execution.routes import AnyRoute, JointRoute, Route
from knapformer.execution.rows import RowIndex, runs_of
from knapformer.execution.transport import Channel
from knapformer.given.cost import CostModel
from knapformer.given.lengths import IntArray, Lengths, parse_local_lengths
from knapformer.plans.evaluation import Evaluation, evaluate
from knapformer.plans.plan import Plan
from knapformer.schedules.attention import attention_schedule
from knapformer.schedules.joint import JointExchange
from knapformer.schedules.tokens import Exchange, RankTokens, conditioning_exchange, token_exchange, window
from knapformer.streams import TEXT, VISUAL, StreamIndex

Kind = tuple[str, str | None]
"""Tokens of a stream, or conditioning of a name."""


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

    def __init__(self, balancer: Executor, plan: Plan, lengths: Lengths, conditioning_rows: Mapping[str, IntArray]):
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
        with outliving():
            return StreamIndex.from_stream_ids(ids, device=self._device)

    @cached_property
    def evaluation(self) -> Evaluation:
        """What the plan costs, as the cost model predicts it."""
        return evaluate(self.plan, self._balancer.cost)

    def conditioning_lengths(self, name: str) -> list[int]:
        """Rows of ragged conditioning ``name`` of each local sequence, in packed order."""
        rows: list[int] = self._conditioning_rows(name)[self.sequence_ids].tolist()
        return rows

    def route(self, *tensors: Tensor, stream: str | None = None, lengths: Any = None) -> Any:
        """Move tokens from home to the ranks that hold them: one all-to-all per dtype and width, differentiable.

        Args:
            tensors: (rows of this rank's sequences at home, …), any number, dtypes and trailing shapes. Every rank
                gives as many, of the same dtypes and trailing shapes, and the same of them requiring gradients.
            stream: the tensors have the rows of this stream only.
            lengths: of the sequences that the rows are of, as ``prepare`` takes them, or of the stream alone. Where
                given they are compared with those that the step was prepared for: rows of [7, 5] are as many as of
                [5, 7].

        Returns:
            (packed rows on this rank, …) for each tensor; a single tensor for a single one.

        Raises:
            LengthsError: the rows are not those of the lengths. Give ``num_rows`` to ``prepare`` for all ranks to know.
        """
        if lengths is not None:
            self.check_lengths(lengths, stream=stream)
        return self._exchange(tensors, ("tokens", stream), reverse=False)

    def restore(self, *tensors: Tensor, stream: str | None = None) -> Any:
        """Bring tokens home, in the original order: the inverse of ``route``, with the same arguments."""
        return self._exchange(tensors, ("tokens", stream), reverse=True)

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
        own = slice(*self.lengths.offsets[self.rank : self.rank + 2].tolist())
        parts = dict(self.lengths.streams)
        given = parse_local_lengths(lengths)
        if stream is not None:
            self._compare(f"tokens of stream {stream!r}", parts.get(stream, self.lengths.tokens)[own], given.get(""))
        elif list(given) == [""]:
            self._compare("tokens", self.lengths.tokens[own], given[""])
        else:
            for name in {**parts, **given}:
                prepared = parts[name][own] if name in parts else None
                self._compare(f"tokens of stream {name!r}", prepared, given.get(name))
        for name, rows in parse_local_lengths(conditioning).items() if conditioning else ():
            self._compare(f"rows of conditioning {name!r}", self._conditioning_rows(name)[own], rows)

    def _compare(self, what: str, prepared: IntArray | None, given: IntArray | None) -> None:
        if prepared is None or given is None or not np.array_equal(prepared, given):
            there, here = ("none" if x is None else shortened(x.tolist()) for x in (prepared, given))
            raise LengthsError(f"rank {self.rank}: the step was prepared for {what} {there}, got {here}")

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
            ConfigurationError: several dtypes, devices or head widths, heads that do not divide, or causal attention
                under a plan with tiles of part of the queries.
        """
        q, k, v = as_one_dtype(q, k, v)
        check_heads(q, k, v, self.num_tokens, self.rank)
        attention = self._attention(q.shape[1], k.shape[1], q.device)
        return attention(q, k, v, scale=scale, causal=causal)

    def _attention(self, num_heads: int, num_kv_heads: int, device: torch.device) -> BalancedAttention:
        """For all layers with these heads. Those of the cost model are made with the step, others when first used."""
        key = (num_heads, num_kv_heads, device)
        if key not in self._attentions:
            balancer = self._balancer
            with outliving():
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
            with outliving():
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


def shortened(values: Sequence[Any], most: int = 12) -> str:
    """As a list, the middle left out where it is long."""
    if len(values) <= most:
        return str(list(values))
    half = most // 2
    return f"[{', '.join(map(str, values[:half]))}, …, {', '.join(map(str, values[-half:]))}] ({len(values)} of them)"
