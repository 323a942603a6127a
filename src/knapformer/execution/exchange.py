"""The one token all-to-all, with autograd: routing, conditioning and attention all go through it.

An exchange is launched by ``start`` and ends in ``finish``, so that other work can run in between; ``exchange`` does
both. Rows travel as bytes of their own dtype: nothing is promoted, and exactly the rows that change rank are moved.
Where one of the tensors of an exchange needs a gradient, gradients of all of them travel.

In backward, gradients take the reversed exchange, also launched at one point and awaited at another. Non-reentrant
checkpointing recomputes a region from the first saved tensor that is unpacked until the last one that was saved; a rank
without heads would start and stop elsewhere than the others, and sends would meet other receives. Therefore each
exchange saves an empty tensor after its end and unpacks it before its backward exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from knapformer.execution.calls import Call, StepCalls
from knapformer.execution.flight import Flight, launch
from knapformer.execution.routes import AnyRoute
from knapformer.execution.transport import Channel, Meter, Scratch

__all__ = ["Channel", "Meter", "Pending", "Scratch", "exchange", "finish", "start"]


@dataclass(slots=True, eq=False)
class Pending:
    """An exchange under way; ``finish`` ends it."""

    route: AnyRoute
    channel: Channel
    has_grad: bool
    calls: StepCalls | None = None
    call: Call | None = None
    needs_grad: tuple[bool, ...] = ()
    token: Tensor | None = None
    flight: Flight | None = None
    backward_flight: Flight | None = None


def exchange(
    tensors: Sequence[Tensor], route: AnyRoute, channel: Channel, calls: StepCalls | None = None, what: str = ""
) -> tuple[Tensor, ...]:
    """Exchange tensors of one dtype and width at once.

    Every rank of ``channel`` calls it, with as many tensors of the same dtype and width, and some of them requiring
    gradients on all ranks or on none. It waits only for ranks that send this one something, or receive from it.

    Args:
        tensors: each (units, width); one of them for a ``Route``.
        route: where their units go.
        channel: over which ranks.
        calls: of the step, where ranks tell calls apart.
        what: it is for, in words that all ranks have in common.

    Returns:
        Each (units of the route's output, width).

    Raises:
        DisagreementError: another rank calls something else, where ranks tell calls apart; on all ranks.
    """
    return finish(start(tensors, route, channel, calls, what))


def start(
    tensors: Sequence[Tensor],
    route: AnyRoute,
    channel: Channel,
    calls: StepCalls | None = None,
    what: str = "",
    *,
    needs_grad: bool = False,
) -> Pending:
    """Launch an exchange; every rank of ``channel`` calls it, and ``finish`` after it.

    Args:
        tensors, route, channel, calls, what: see ``exchange``.
        needs_grad: some rank's tensors require gradients; then this rank takes part in the backward pass even if its
            own do not.
    """
    has_own = any(x.requires_grad for x in tensors)
    pending = Pending(route, channel, torch.is_grad_enabled() and (needs_grad or has_own), calls)
    anchor = None
    if pending.has_grad and not has_own:
        anchor = tensors[0].new_zeros((), requires_grad=True)
    if calls is not None:
        pending.call = calls.make(calls.calls.described(what, tensors), has_grad=pending.has_grad)
    pending.token = _Start.apply(pending, anchor, *tensors)
    return pending


def finish(pending: Pending) -> tuple[Tensor, ...]:
    """The tensors of an exchange that was launched."""
    # A token that stayed with ``pending`` would close a cycle through its graph, and keep that alive.
    token, pending.token = pending.token, None
    outputs: tuple[Tensor, ...] = _Finish.apply(pending, token)
    return outputs


class _Start(Function):
    """Launches the exchange. An empty token ties ``_Finish`` to it in the graph; data goes through ``pending``."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, _anchor: Tensor | None, *tensors: Tensor) -> Tensor:
        pending.needs_grad = tuple(ctx.needs_input_grad[2:])
        ctx.pending = pending
        pending.flight = launch(tensors, pending.route, pending.channel, pending.call)
        token = tensors[0].new_empty(0)
        if not pending.has_grad:
            ctx.mark_non_differentiable(token)
        return token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        pending: Pending = ctx.pending
        flight, pending.backward_flight = pending.backward_flight, None
        assert flight is not None
        found = zip(flight.land(), pending.needs_grad, strict=True)
        return None, None, *(x if needed else None for x, needed in found)


class _Finish(Function):
    """Waits for the exchange and unpacks it; in backward, launches the reversed one."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, token: Tensor) -> tuple[Tensor, ...]:
        flight, pending.flight = pending.flight, None
        assert flight is not None
        outputs = flight.land()
        ctx.pending = pending
        ctx.save_for_backward(token.new_empty(0))
        if not pending.has_grad:
            ctx.mark_non_differentiable(*outputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (empty,) = ctx.saved_tensors
        pending: Pending = ctx.pending
        call = None
        if pending.calls is not None and pending.call is not None:
            call = pending.calls.backward(pending.call)
        pending.backward_flight = launch(gradients, pending.route.reversed, pending.channel, call)
        return None, empty
