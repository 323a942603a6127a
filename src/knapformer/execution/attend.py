"""Attention under a plan: exchange, kernel, exchange back; whole sequences meanwhile, on the rank that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knapformer.errors import ConfigurationError, LengthsError
from knapformer.execution.calls import StepCalls, is_backward_running
from knapformer.execution.devices import outliving, to_device
from knapformer.execution.exchange import finish, start
from knapformer.execution.kernels import Offsets, choose_kernel, varlen_attention
from knapformer.execution.routes import JointRoute
from knapformer.execution.rows import rows
from knapformer.execution.transport import Channel
from knapformer.execution.turns import Turns, take_turns
from knapformer.given.lengths import IntArray
from knapformer.schedules.attention import AttentionSchedule

Tensors = tuple[Tensor, ...]


class BalancedAttention:
    """The attention of one rank under one plan, for models of one number of heads.

    Args:
        schedule: what this rank does.
        channel: over which ranks.
        device: of the tensors.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        kernel: see ``knapformer.execution.kernels.varlen_attention``.
        overlap: compute whole sequences' attention while q, k and v are in flight.
        calls: of the step, where ranks tell calls apart.
        lane: in words, where there are several.
    """

    def __init__(
        self,
        schedule: AttentionSchedule,
        channel: Channel,
        device: torch.device,
        *,
        num_heads: int,
        num_kv_heads: int,
        kernel: str = "auto",
        overlap: bool = True,
        calls: StepCalls | None = None,
        lane: str = "",
    ) -> None:
        self.calls, self.lane = calls, lane
        self._said: dict[Any, str] = {}
        self.schedule, self.channel, self.kernel, self.overlap = schedule, channel, kernel, overlap
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self._kernels: dict[Any, str] = {}
        self.before = JointRoute.of(schedule.before, device)
        self.after = JointRoute.of(schedule.after, device).reversed
        self.cu_whole = _offsets(schedule.whole_lengths, device)
        self.cu_queries = _offsets(schedule.query_lengths, device)
        self._keys: dict[bool, tuple[Offsets, Tensor | None]] = {}
        self._keys_of(False, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False) -> Tensor:
        """As ``turns``, without others to take them with."""
        return take_turns([self.turns(q, k, v, scale=scale, causal=causal)])[0]

    def turns(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False
    ) -> Turns[Tensor]:
        """Attend, and yield where it would wait. Every rank of the group runs it for every layer.

        Two all-to-alls, unless no sequence is split.

        Args:
            q: (T, H, D) packed rows of this rank.
            k, v: (T, Hkv, D), of the dtype of q on every rank; see ``check_heads``.
            scale: of the scores; None means 1/√D.
            causal: a query sees keys up to its own position.

        Returns:
            (T, H, D).

        Raises:
            DisagreementError: another rank calls something else, where ranks tell calls apart; on all ranks.
        """
        what = self._what(q, scale, causal)
        if self.schedule.is_local:
            self._note(what, q, k, v)
            return self._whole((q, k, v), scale, causal)
        own, shared = self._apart(q, k, v)
        pending = start([x.reshape(-1, x.shape[-1]) for x in shared], self.before, self.channel, self.calls, what)
        whole = self._whole(own, scale, causal) if self.overlap else None
        yield
        received = finish(pending)
        if whole is None:
            whole = self._whole(own, scale, causal)
        what = self._what(q, scale, causal, " output")
        tiles = self._tiles(received, scale, causal)
        pending = start([tiles], self.after, self.channel, self.calls, what)
        yield
        (split,) = finish(pending)
        split = split.view(-1, self.num_heads, split.shape[-1])
        return torch.cat([whole, split]) if self.cu_whole[-1] else split

    def _what(self, q: Tensor, scale: float | None, causal: bool, part: str = "") -> str:
        """In words that all ranks have in common; empty where calls are not told apart."""
        if self.calls is None:
            return ""
        key = (q.shape[-1], scale, causal, part)
        if key not in self._said:
            found = q.shape[-1] ** -0.5 if scale is None and q.shape[-1] else scale
            self._said[key] = (
                f"attention{part}, {self.num_heads} heads, {self.num_kv_heads} of k and v, scale {found}"
                f"{', causal' if causal else ''}{self.lane}"
            )
        return self._said[key]

    def _note(self, what: str, *tensors: Tensor) -> None:
        """Attention without an exchange. Recomputation is left out: a rank without rows has nothing to recompute."""
        if self.calls is None or is_backward_running():
            return
        has_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        described = self.calls.calls.described(what, [x.flatten(1) for x in tensors[:1]])
        self.calls.make(described, has_grad=has_grad)

    def _apart(self, *tensors: Tensor) -> tuple[Tensors, Tensors]:
        """Rows of whole sequences and rows of split ones; split and not sliced, which costs less in backward.

        Attention keeps the whole sequences' rows until the backward pass, and with them the memory of the tensors that
        they are a part of. Where that is more than half of it, they are copied, and the split ones' memory is free.
        """
        num_whole = self.cu_whole[-1]
        num_split = tensors[0].shape[0] - num_whole
        if not num_whole:
            return tuple(x[:0] for x in tensors), tensors
        own, shared = zip(*(x.split([num_whole, num_split]) for x in tensors), strict=True)
        return tuple(x.clone() for x in own) if num_split > num_whole else own, shared

    def _whole(self, tensors: Tensors, scale: float | None, causal: bool) -> Tensor:
        q, k, v = tensors
        cu = self.cu_whole
        return varlen_attention(q, k, v, cu, cu, scale=scale, causal=causal, kernel=self._kernel(q))

    def _kernel(self, q: Tensor) -> str:
        """Of all tensors of a dtype, head width and device; chosen once."""
        key = (q.dtype, q.shape[-1], q.device)
        if key not in self._kernels:
            self._kernels[key] = choose_kernel(q) if self.kernel == "auto" else self.kernel
        return self._kernels[key]

    def _tiles(self, received: Tensors, scale: float | None, causal: bool) -> Tensor:
        """(rows of entries, D): each entry is one head of one tile, and a batch entry of one head for the kernel."""
        q, k, v = received
        cu_q, (cu_k, key_rows) = self.cu_queries, self._keys_of(causal, q.device)
        if key_rows is not None:
            k, v = (rows(x, key_rows) for x in (k, v))
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        return varlen_attention(q, k, v, cu_q, cu_k, scale=scale, causal=causal, kernel=self._kernel(q)).squeeze(1)

    def _keys_of(self, causal: bool, device: torch.device) -> tuple[Offsets, Tensor | None]:
        """Keys of each entry of q: all of its sequence, or those up to the entry's last query. Made when first used."""
        if causal not in self._keys:
            schedule = self.schedule
            lengths = schedule.query_ends if causal else schedule.key_lengths[schedule.key_of_query]
            with outliving():
                self._keys[causal] = _offsets(lengths, device), _key_rows(schedule, lengths, device)
        return self._keys[causal]


def check_heads(q: Tensor, k: Tensor, v: Tensor, num_rows: int, rank: int) -> None:
    """Everything about q (T, H, D), k and v (T, Hkv, D) that one rank can see by itself.

    Args:
        num_rows: T.
        rank: this rank, for the error.

    Raises:
        LengthsError: other rows than the plan gives to this rank.
        ConfigurationError: not three dimensions, another head width, dtype or device than that of q, other heads of v
            than of k, or heads of q that are no multiple of those of k.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ConfigurationError(f"rank {rank}: expected {name} (rows, heads, width), got shape {tuple(x.shape)}")
        if x.shape[0] != num_rows:
            raise LengthsError(f"rank {rank}: the plan gives it {num_rows} tokens, {name} has {x.shape[0]}")
        if (x.shape[2], x.dtype, x.device) != (q.shape[2], q.dtype, q.device):
            raise ConfigurationError(
                f"rank {rank}: q has heads of width {q.shape[2]}, {q.dtype} on {q.device}; expected the same of "
                f"{name}, got width {x.shape[2]}, {x.dtype} on {x.device}"
            )
    if v.shape[1] != k.shape[1]:
        raise ConfigurationError(f"rank {rank}: k has {k.shape[1]} heads, expected as many of v, got {v.shape[1]}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ConfigurationError(f"rank {rank}: q has {q.shape[1]} heads, expected a multiple of k's {k.shape[1]}")


def as_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast the tensors in its dtype, as PyTorch's own attention takes them; else as they are.

    Casting comes before the exchange: it halves the bytes, and ranks without any row send and expect the same dtype.

    Raises:
        ConfigurationError: they still have several dtypes.
    """
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        narrow = torch.get_autocast_dtype(kind)
        tensors = tuple(x if x.dtype == torch.float64 else x.to(narrow) for x in tensors)
    if len({x.dtype for x in tensors}) > 1:
        raise ConfigurationError(f"q, k and v must have one dtype, got {', '.join(str(x.dtype) for x in tensors)}")
    return tensors


def _offsets(lengths: Sequence[int] | np.ndarray, device: torch.device) -> Offsets:
    return Offsets([0, *np.cumsum(lengths, dtype=np.int64).tolist()], device)


def _key_rows(schedule: AttentionSchedule, lengths: IntArray, device: torch.device) -> Tensor | None:
    """(rows,) which received rows of k each query entry's keys are, the first ``lengths`` (E,) rows of an entry of k;
    None where they are all, in order.
    """
    entries = schedule.key_of_query
    if np.array_equal(entries, np.arange(len(schedule.key_lengths))) and np.array_equal(lengths, schedule.key_lengths):
        return None
    starts = np.cumsum(schedule.key_lengths) - schedule.key_lengths
    shift = starts[entries] - (np.cumsum(lengths) - lengths)
    return to_device(np.arange(lengths.sum()) + np.repeat(shift, lengths), device)
