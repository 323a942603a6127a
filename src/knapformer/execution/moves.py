"""Rows from home to the ranks that hold them and back, for one step: checked, agreed on, exchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from knapformer.errors import ConfigurationError, KnapFormerError, LengthsError
from knapformer.execution.calls import VOTE, Call, StepCalls, short
from knapformer.execution.devices import outliving
from knapformer.execution.exchange import Pending, finish, start
from knapformer.execution.routes import AnyRoute, JointRoute, Route
from knapformer.execution.transport import Channel, combined
from knapformer.given.lengths import IntArray, Lengths, parse_local_lengths
from knapformer.plans.plan import Plan
from knapformer.schedules.joint import JointExchange
from knapformer.schedules.meetings import connected, links_of
from knapformer.schedules.tokens import Exchange, RankTokens, conditioning_exchange, token_exchange

Kind = tuple[str, str | None]
"""Tokens of a stream, or conditioning of a name."""

Part = tuple[Sequence[Tensor], Kind]
"""Tensors of one kind."""

Started = tuple[list[int], Pending]
"""Which tensors of a part are under way, and their exchange."""

MOST_IN_MASK = 62
"""Tensors of one call whose need for gradients fits into a number."""


class Moves:
    """What a step moves between homes and holders, on one rank.

    Args:
        plan, lengths, tokens, rank: of the step.
        conditioning_rows: (S,) rows of ragged conditioning, by name.
        channel: over which ranks.
        device: of the kind that the channel's messages come from.
        control: gloo group of the same ranks; None for one rank.
        calls: of the step, where ranks tell calls apart.
    """

    def __init__(
        self,
        plan: Plan,
        lengths: Lengths,
        tokens: RankTokens,
        rank: int,
        *,
        conditioning_rows: Mapping[str, IntArray],
        channel: Channel,
        device: torch.device,
        control: dist.ProcessGroup | None,
        calls: StepCalls | None,
    ) -> None:
        self.plan, self.lengths, self.tokens, self.rank = plan, lengths, tokens, rank
        self.channel, self.control, self.calls = channel, control, calls
        self.device = device
        self._rows = dict(conditioning_rows)
        self._schedules: dict[Kind, Exchange] = {}
        self._routes: dict[Any, AnyRoute] = {}

    def move(self, parts: Sequence[Part], *, reverse: bool) -> list[list[Tensor]]:
        """All tensors, those of one kind, dtype and width at once, and all of them under way at the same time.

        Every rank of the channel calls it. On the way out, ranks that the step connects first agree on which tensors
        need gradients: any rank is enough, and the others' gradients are not asked for. They agree once for all parts.

        Args:
            parts: tensors and their kind.

        Returns:
            Of each part the moved tensors.
        """
        try:
            rows = [self._checked(tensors, kind, reverse) for tensors, kind in parts]
        except KnapFormerError as error:
            self._fail(error, parts, reverse)
            raise
        wanted = [[x.requires_grad for x in tensors] for tensors, _ in parts]
        if not reverse and self._votes(parts):
            flat = self._agreed(_all_of(parts, reverse), [needed for own in wanted for needed in own], None)
            wanted = [[flat.pop(0) for _ in own] for own in wanted]
        pending = [
            self._start(tensors, kind, reverse, own, needed)
            for (tensors, kind), own, needed in zip(parts, rows, wanted, strict=True)
        ]
        return [_finish(tensors, started) for (tensors, _), started in zip(parts, pending, strict=True)]

    def _start(
        self, tensors: Sequence[Tensor], kind: Kind, reverse: bool, rows: list[Tensor], wanted: list[bool]
    ) -> list[Started]:
        """Launch the exchanges of one part; every rank of the channel calls it."""
        what = _what(tensors, kind, reverse)
        alike: dict[Any, list[int]] = {}
        for i, x in enumerate(rows):
            alike.setdefault((x.dtype, x.shape[1], x.device), []).append(i)
        started = []
        for (_, _, device), chosen in alike.items():
            needs_grad = any(wanted[i] for i in chosen)
            route, some = self.route(kind, device, reverse, len(chosen)), [rows[i] for i in chosen]
            started.append((chosen, start(some, route, self.channel, self.calls, what, needs_grad=needs_grad)))
        return started

    def _votes(self, parts: Sequence[Part]) -> bool:
        """Whether ranks agree on what needs gradients; one that doesn't is waited for, and told (``calls``)."""
        if self.calls is None or not torch.is_grad_enabled():
            return False
        return any(x.is_floating_point() for tensors, _ in parts for x in tensors)

    def _agreed(self, what: str, wanted: Sequence[bool], error: KnapFormerError | None) -> list[bool]:
        """Which tensors need gradients on any rank that this step connects with this one.

        Every rank calls it, in the same place. Ranks that nothing connects do not wait for one another.

        Raises:
            DisagreementError: they move other tensors; on all of them.
            KnapFormerError: what is wrong on one of them; on all of them.
        """
        assert self.calls is not None and self.control is not None
        described = self.calls.calls.worded(what)
        call = self.calls.make(described)
        if len(self._members) == 1:
            return list(wanted)
        mask = sum(1 << i for i, needed in enumerate(wanted[:MOST_IN_MASK]) if needed)
        numbers = [mask, int(error is not None), described.code, -described.code]
        voting = Call.of(call.step, call.part, call.place, VOTE)
        calls = self.calls.calls
        mask, failed, most, least = combined(numbers, self._members, calls, call, voting.tag, self.control)
        if failed or most != -least:
            raise calls.settle(call, self._members, error)
        return [bool(mask >> i & 1) if i < MOST_IN_MASK else needed for i, needed in enumerate(wanted)]

    def _fail(self, error: KnapFormerError, parts: Sequence[Part], reverse: bool) -> None:
        """Let the others know what is wrong on this rank."""
        if self.calls is None:
            return
        if reverse or not self._votes(parts) or len(self._members) == 1:
            self.calls.failed(error)
            return
        try:
            self._agreed(_all_of(parts, reverse), [False] * sum(len(tensors) for tensors, _ in parts), error)
        except KnapFormerError as settled:
            if str(settled) != str(error):
                raise settled from error

    @cached_property
    def _members(self) -> list[int]:
        label = connected([links_of(self.plan, self.lengths)], self.plan.world_size)
        members: list[int] = np.flatnonzero(label == label[self.rank]).tolist()
        return members

    def _checked(self, tensors: Sequence[Tensor], kind: Kind, reverse: bool) -> list[Tensor]:
        """Each tensor as (units, width)."""
        if not tensors:
            raise ConfigurationError(f"rank {self.rank}: expected at least one tensor")
        schedule = self._schedule(kind)
        wanted = schedule.num_out if reverse else schedule.num_in
        for x in tensors:
            if x.dim() == 0 or x.shape[0] != wanted:
                raise LengthsError(f"rank {self.rank}: expected a tensor of {wanted} rows, got shape {tuple(x.shape)}")
            if self.channel.transport is not None and x.device.type != self.device.type:
                raise ConfigurationError(f"rank {self.rank}: expected a tensor on {self.device.type}, got {x.device}")
        return [x.reshape(x.shape[0], math.prod(x.shape[1:])) for x in tensors]

    def compare_lengths(self, lengths: Any, stream: str | None, conditioning: Mapping[str, Any] | None) -> None:
        """See ``knapformer.Step.check_lengths``. It tells no other rank.

        Raises:
            LengthsError: they are not those that the step was prepared for.
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
            self._compare(f"rows of conditioning {name!r}", self.conditioning_rows(name)[own], rows)

    def _compare(self, what: str, prepared: IntArray | None, given: IntArray | None) -> None:
        if prepared is None or given is None or not np.array_equal(prepared, given):
            there, here = ("none" if x is None else _shortened(x.tolist()) for x in (prepared, given))
            raise LengthsError(f"rank {self.rank}: the step was prepared for {what} {there}, got {here}")

    def route(self, kind: Kind, device: torch.device, reverse: bool, num_tensors: int) -> AnyRoute:
        """Made once; several tensors at once share one buffer."""
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
            where, (what, name) = (self.plan, self.lengths, self.tokens, self.rank), kind
            self._schedules[kind] = (
                token_exchange(*where, stream=name)
                if what == "tokens"
                else conditioning_exchange(*where, rows=None if name is None else self.conditioning_rows(name))
            )
        return self._schedules[kind]

    def conditioning_rows(self, name: str) -> IntArray:
        """(S,) rows of ragged conditioning.

        Raises:
            ConfigurationError: ``prepare`` was not told of it.
        """
        if name not in self._rows:
            raise ConfigurationError(f"no conditioning {name!r}: prepare was told of {sorted(self._rows)}")
        return self._rows[name]


def _finish(tensors: Sequence[Tensor], started: Sequence[Started]) -> list[Tensor]:
    """Wait for the exchanges of one part, and give each tensor its trailing shape again."""
    outputs = {}
    for chosen, pending in started:
        for i, y in zip(chosen, finish(pending), strict=True):
            outputs[i] = y.view(y.shape[0], *tensors[i].shape[1:])
    return [outputs[i] for i in range(len(tensors))]


def _all_of(parts: Sequence[Part], reverse: bool) -> str:
    """What is moved at once, in words that all ranks have in common."""
    return "; ".join(_what(tensors, kind, reverse) for tensors, kind in parts)


def _what(tensors: Sequence[Tensor], kind: Kind, reverse: bool) -> str:
    """What is moved, in words that all ranks have in common."""
    what, name = kind
    shapes = ", ".join(f"{short(x.dtype)} {tuple(x.shape[1:])}" for x in tensors)
    return f"{'restore' if reverse else 'route'} of {what if name is None else f'{what} {name!r}'}: {shapes}"


def _shortened(values: Sequence[Any], most: int = 12) -> str:
    """As a list, the middle left out where it is long."""
    if len(values) <= most:
        return str(list(values))
    half = most // 2
    return f"[{', '.join(map(str, values[:half]))}, …, {', '.join(map(str, values[-half:]))}] ({len(values)} of them)"
