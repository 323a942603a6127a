"""The attention of a step: one for each lane, and all lanes at once for models that know nothing of lanes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from knapformer.errors import KnapFormerError
from knapformer.execution.attend import BalancedAttention, as_one_dtype, check_heads
from knapformer.execution.calls import StepCalls
from knapformer.execution.devices import outliving
from knapformer.execution.operator import attend, handle_of
from knapformer.execution.transport import Channel
from knapformer.execution.turns import Turns, take_turns
from knapformer.plans.plan import Plan
from knapformer.schedules.attention import attention_schedule
from knapformer.schedules.tokens import RankTokens


class LaneAttention:
    """The attention of one lane of a step, for models of any number of heads.

    Attributes:
        num_rows: packed rows of the lane on this rank.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        lane: int,
        *,
        channel: Channel,
        calls: StepCalls | None,
        kernel: str,
        overlap: bool,
    ) -> None:
        self._plan, self._rank, self._lane = plan, rank, lane
        self._tokens = RankTokens.of(plan, rank, lane)
        self._channel, self._calls, self._kernel, self._overlap = channel, calls, kernel, overlap
        self._made: dict[Any, BalancedAttention] = {}
        self.num_rows = self._tokens.num_rows

    def turns(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False
    ) -> Turns[Tensor]:
        """See ``knapformer.Step.attention``, for the lane's rows; yields where it would wait."""
        with _telling(self._calls):
            q, k, v = as_one_dtype(q, k, v)
            check_heads(q, k, v, self.num_rows, self._rank)
            attention = self.made(q.shape[1], k.shape[1], q.device)
        return (yield from attention.turns(q, k, v, scale=scale, causal=causal))

    def made(self, num_heads: int, num_kv_heads: int, device: torch.device) -> BalancedAttention:
        """For all layers with these heads; made when first used."""
        key = (num_heads, num_kv_heads, device)
        if key not in self._made:
            schedule = attention_schedule(self._plan, self._tokens, self._rank, num_heads, num_kv_heads, self._lane)
            with outliving():
                self._made[key] = BalancedAttention(
                    schedule,
                    self._channel,
                    device,
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    kernel=self._kernel,
                    overlap=self._overlap,
                    calls=self._calls,
                    lane=f", lane {self._lane}" if self._plan.num_lanes > 1 else "",
                )
        return self._made[key]


class Lane:
    """A lane as the blocks of a model see it.

    Attributes:
        num_rows: packed rows of the lane on this rank.
        turns: see ``LaneAttention.turns``.
    """

    def __init__(self, attention: LaneAttention, handle: Tensor) -> None:
        self.num_rows, self.turns, self._handle = attention.num_rows, attention.turns, handle

    def together(self, lanes: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        """Attention of all lanes at once, for compiled blocks: q, k and v of each to the result of each.

        Lanes take turns inside the attention only.
        """
        q, k, v = (torch.cat(parts) for parts in zip(*lanes, strict=True))
        out = attend(q, k, v, self._handle, scale=None, causal=False)
        return list(out.split([own.shape[0] for own, _, _ in lanes]))


class StepAttention:
    """Attention of all packed rows of a step, lane after lane. Every rank calls it for every layer.

    Attributes:
        lanes: a model whose blocks take turns between them has the exchange of one under way while the other computes.
            A model that calls this object has its lanes take turns inside the attention only.
        handle: for compiled code.
    """

    def __init__(self, lanes: tuple[LaneAttention, ...], rank: int, calls: StepCalls | None) -> None:
        self._all = _AllLanes(lanes, rank, calls)
        self.handle = handle_of(self._all)
        self.lanes = tuple(Lane(lane, self.handle) for lane in lanes)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False) -> Tensor:
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
            ConfigurationError: several dtypes, devices or head widths, or heads that do not divide; on all ranks.
            DisagreementError: ranks differ in dtype, width, heads, scale, causal, in whether gradients are needed, or
                in which call this is; on all ranks.
        """
        if torch.compiler.is_compiling():
            return attend(q, k, v, self.handle, scale=scale, causal=causal)
        return self._all(q, k, v, scale=scale, causal=causal)

    def make(self, num_heads: int, num_kv_heads: int, device: torch.device) -> None:
        """What layers with these heads need, now and not inside the first of them."""
        for lane in self._all.lanes:
            lane.made(num_heads, num_kv_heads, device)


class _AllLanes:
    """What ``StepAttention`` does, without a handle."""

    def __init__(self, lanes: tuple[LaneAttention, ...], rank: int, calls: StepCalls | None) -> None:
        self.lanes, self._rank, self._calls = lanes, rank, calls

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, causal: bool) -> Tensor:
        if len(self.lanes) == 1:
            return take_turns([self.lanes[0].turns(q, k, v, scale=scale, causal=causal)])[0]
        counts = [lane.num_rows for lane in self.lanes]
        with _telling(self._calls):
            check_heads(q, k, v, sum(counts), self._rank)
        parts = zip(*(x.split(counts) for x in (q, k, v)), strict=True)
        turns = [lane.turns(*part, scale=scale, causal=causal) for lane, part in zip(self.lanes, parts, strict=True)]
        return torch.cat(take_turns(turns))


@contextmanager
def _telling(calls: StepCalls | None) -> Iterator[None]:
    """Let those know of an error that wait for this rank."""
    try:
        yield
    except KnapFormerError as error:
        if calls is not None:
            calls.failed(error)
        raise
