"""Variable-length attention behind one seam: FlashAttention or torch's varlen on CUDA, SDPA everywhere."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from knapformer.errors import ConfigurationError

Kernel = Callable[..., Tensor]

HALF_DTYPES = (torch.float16, torch.bfloat16)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    *,
    scale: float | None = None,
    causal: bool = False,
    kernel: str = "auto",
) -> Tensor:
    """Attention of entries that lie one after another: entry i's queries see entry i's keys, and nothing else.

    Args:
        q: (Tq, H, D).
        k, v: (Tk, Hkv, D); Hkv divides H.
        cu_q, cu_k: (E + 1,) where each entry starts, and the total, on the host. Entries may be empty; queries
            without keys get 0.
        scale: of the scores; None means 1/√D.
        causal: a query sees keys up to its own position; entries then have as many queries as keys.
        kernel: ``"auto"``, ``"sdpa"``, ``"flash"`` (package flash-attn) or ``"varlen"`` (torch.nn.attention.varlen).

    Returns:
        (Tq, H, D).

    Raises:
        ConfigurationError: an unknown kernel, or one that cannot run here.
    """
    if q.shape[0] == 0:
        # No row, and still in the graph of q, k and v, so that backward issues the collectives of the other ranks.
        return q + (k.sum() + v.sum()).to(q.dtype)
    if kernel == "auto":
        kernel = choose_kernel(q)
    if kernel not in KERNELS:
        raise ConfigurationError(f"unknown attention kernel {kernel!r}; known: auto, {', '.join(KERNELS)}")
    return KERNELS[kernel](q, k, v, list(cu_q), list(cu_k), scale=scale, causal=causal)


def choose_kernel(q: Tensor) -> str:
    """What ``"auto"`` means for such a tensor."""
    if q.device.type != "cuda" or q.dtype not in HALF_DTYPES:
        return "sdpa"
    if importlib.util.find_spec("flash_attn") is not None:
        return "flash"
    return "varlen" if _has_torch_varlen() else "sdpa"


def _has_torch_varlen() -> bool:
    """The module came with torch 2.10, the options that are needed here later."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, cu_q: list[int], cu_k: list[int], *, scale: float | None, causal: bool
) -> Tensor:
    """One call for each run of entries of equal lengths."""
    entries = list(zip(pairwise(cu_q), pairwise(cu_k), strict=True))
    parts = []
    for (num_q, num_k), run in groupby(entries, key=lambda e: (e[0][1] - e[0][0], e[1][1] - e[1][0])):
        bounds = list(run)
        if num_q == 0:
            continue
        if num_k == 0:
            parts.append(torch.zeros_like(q[bounds[0][0][0] : bounds[-1][0][1]]))
            continue
        (first_q, first_k), (last_q, last_k) = ((e[0][i], e[1][i]) for e, i in ((bounds[0], 0), (bounds[-1], 1)))
        batch_q, batch_k, batch_v = (
            x[a:b].unflatten(0, (len(bounds), n)).transpose(1, 2)
            for x, a, b, n in ((q, first_q, last_q, num_q), (k, first_k, last_k, num_k), (v, first_k, last_k, num_k))
        )
        out = functional.scaled_dot_product_attention(
            batch_q, batch_k, batch_v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, cu_q: list[int], cu_k: list[int], *, scale: float | None, causal: bool
) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]

    offsets = [_offsets(cu, q.device) for cu in (cu_q, cu_k)]
    out: Tensor = flash_attn_varlen_func(
        q, k, v, *offsets, _longest(cu_q), _longest(cu_k), softmax_scale=scale, causal=causal
    )
    return out


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: list[int], cu_k: list[int], *, scale: float | None, causal: bool
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        q,
        k,
        v,
        _offsets(cu_q, q.device),
        _offsets(cu_k, q.device),
        _longest(cu_q),
        _longest(cu_k),
        scale=scale,
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=k.shape[1] != q.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def _offsets(cu: list[int], device: torch.device) -> Tensor:
    return torch.tensor(cu, dtype=torch.int32).to(device, non_blocking=True)


def _longest(cu: list[int]) -> int:
    return max((b - a for a, b in pairwise(cu)), default=0)


KERNELS: dict[str, Kernel] = {"sdpa": _sdpa, "flash": _flash, "varlen": _varlen}
