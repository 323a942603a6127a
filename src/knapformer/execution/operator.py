"""Balanced attention as one operator of PyTorch, for models that are compiled.

A compiler that looked into a step's attention would meet the planner's tables, clocks and messages, which are others in
each step. So it sees one operator, of which it knows the shapes only. The step is found through a tensor that the graph
takes as an input: the same graph serves every step.

The operator runs the attention that uncompiled models run, with a graph of autograd's of its own, and keeps that on its
second output, the *tape*. Whoever keeps the tape for the backward pass keeps the graph; when the tape goes, so does the
graph. A hook that saves a copy of the tape instead (such as ``save_on_cpu``) loses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knapformer.execution.attend import as_one_dtype
from knapformer.execution.devices import outliving


def handle_of(attention: Any) -> Tensor:
    """() int64, through which the operator finds ``attention``, and which keeps it alive: it must not hold the handle.

    Compiled code that recomputes in backward keeps the handle, and else nothing of the step.
    """
    with outliving():
        handle = torch.zeros((), dtype=torch.int64)
    handle._attention = attention  # type: ignore[attr-defined]  # an attribute of our own
    return handle


def attend(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, *, scale: float | None, causal: bool) -> Tensor:
    """The attention that ``handle`` belongs to, in compiled code. Of a step's, every rank calls it, for every layer.

    Args:
        q: (T, H, D).
        k, v: (T, Hkv, D), of other rows in cross-attention.
        handle: of a step's attention, or of ``knapformer.execution.local_attention``.
        scale, causal: see ``knapformer.execution.step_attention.StepAttention``.

    Returns:
        (T, H, D).
    """
    has_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    q, k, v = as_one_dtype(q, k, v)
    out: Tensor = _attention(q, k, v, handle, scale, causal, has_grad)[0]
    return out


@torch.library.custom_op("knapformer::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, handle: Tensor, scale: float | None, causal: bool, has_grad: bool
) -> tuple[Tensor, Tensor]:
    """Every rank calls it. Gives (T, H, D) and the tape."""
    attention = handle._attention  # type: ignore[attr-defined]
    tape = torch.zeros((), dtype=torch.int64)
    if not has_grad:
        (out,) = _apart([attention(q, k, v, scale=scale, causal=causal)], q, k, v)
        return out, tape
    with _Recording():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*inputs, scale=scale, causal=causal)
    tape._graph = (out, inputs)  # type: ignore[attr-defined]
    (result,) = _apart([out.detach()], q, k, v)
    return result, tape


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, scale: Any, causal: bool, has_grad: bool) -> Any:
    return q.new_empty(q.shape), handle.new_empty(())


@torch.library.custom_op("knapformer::attention_backward", mutates_args=())
def _attention_backward(
    gradient: Tensor, tape: Tensor, num_keys: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Every rank calls it. Gives the gradients of q, k and v."""
    graph = tape.__dict__.pop("_graph", None)
    if graph is None:
        raise RuntimeError(
            "the backward pass of balanced attention ran a second time, or a hook on saved tensors gave it a copy"
        )
    out, inputs = graph
    with _Recording():
        found = torch.autograd.grad(out, inputs, gradient)
    q, k, v = _apart(found, gradient)
    return q, k, v


@_attention_backward.register_fake
def _(gradient: Tensor, tape: Tensor, num_keys: int, num_kv_heads: int) -> Any:
    like_keys = (gradient.new_empty((num_keys, num_kv_heads, gradient.shape[2])) for _ in range(2))
    return gradient.new_empty(gradient.shape), *like_keys


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.num_keys, ctx.num_kv_heads, _ = inputs[1].shape
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, gradient: Tensor, _of_tape: Any) -> Any:
    (tape,) = ctx.saved_tensors
    return *_attention_backward(gradient, tape, ctx.num_keys, ctx.num_kv_heads), None, None, None, None


_attention.register_autograd(_backward, setup_context=_keep)


def in_order(x: Tensor, earlier: Tensor) -> Tensor:
    """``x``, which compiled code has only after ``earlier``, and whose gradient it has before that of ``earlier``.

    A compiler may run two attentions of a block in either order where neither needs the other's result, on one rank so
    and on another otherwise.

    Args:
        x: goes into the later attention.
        earlier: what the earlier one gave.
    """
    if not torch.compiler.is_compiling():
        return x
    ordered: Tensor = _in_order(x, earlier)
    return ordered


@torch.library.custom_op("knapformer::in_order", mutates_args=())
def _in_order(x: Tensor, earlier: Tensor) -> Tensor:
    return x.clone()


@_in_order.register_fake
def _(x: Tensor, earlier: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("knapformer::zeros_after", mutates_args=())
def _zeros_after(gradient: Tensor, shape: Sequence[int]) -> Tensor:
    return gradient.new_zeros(shape)


@_zeros_after.register_fake
def _(gradient: Tensor, shape: Sequence[int]) -> Tensor:
    return gradient.new_empty(shape)


def _keep_shape(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.shape = inputs[1].shape


_in_order.register_autograd(
    lambda ctx, gradient: (gradient, _zeros_after(gradient, ctx.shape)), setup_context=_keep_shape
)


class _Recording:
    """Autograd records, though an operator runs below it."""

    def __enter__(self) -> None:
        self._excluded = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
        self._grad = torch.enable_grad()
        self._excluded.__enter__()
        self._grad.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._grad.__exit__(*error)
        self._excluded.__exit__(*error)


def _apart(outputs: Sequence[Tensor], *inputs: Tensor) -> list[Tensor]:
    """Contiguous, and copied where they share memory with an input or with one another: an operator's must not."""
    taken, found = {x.untyped_storage()._cdata for x in inputs}, []
    for x in outputs:
        own = x.clone(memory_format=torch.contiguous_format) if x.untyped_storage()._cdata in taken else x.contiguous()
        taken.add(own.untyped_storage()._cdata)
        found.append(own)
    return found
