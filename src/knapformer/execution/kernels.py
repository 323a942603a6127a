"""Variable-length attention behind one seam: FlashAttention or torch's varlen on CUDA, SDPA everywhere."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from knapformer.errors import ConfigurationError
from knapformer.execution.devices import to_device

Kernel = Callable[..., Tensor]

HALF_DTYPES = (torch.float16, torch.bfloat16)
MAX_FLASH_WIDTH = 256


class Offsets(Sequence[int]):
    """Where entries start, and the total: (E + 1,) on the host, and the same on the device for kernels that want it.

    Made once for all layers of a step, because each copy to the device costs a launch.

    Attributes:
        host: a list.
        device: int32.
        longest: rows of the longest entry.
    """

    def __init__(self, cu: Sequence[int], device: torch.device) -> None:
        self.host = [int(start) for start in cu]
        self.device = to_device(torch.tensor(self.host, dtype=torch.int32), device)
        self.longest = max((b - a for a, b in pairwise(self.host)), default=0)

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, index: Any) -> Any:
        return self.host[index]


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
        cu_q, cu_k: (E + 1,) where each entry starts, and the total, on the host; as ``Offsets`` where they serve
            several layers. Entries may be empty; queries without keys get 0.
        scale: of the scores; None means 1/√D.
        causal: the last query of an entry sees all of its keys, the one before it all but one, and so on; entries have
            at least as many keys as queries then.
        kernel: ``"auto"``, ``"sdpa"``, ``"flash"`` (package flash-attn) or ``"varlen"`` (torch.nn.attention.varlen).

    Returns:
        (Tq, H, D).

    Raises:
        ConfigurationError: an unknown kernel, or one that cannot run here.
    """
    if q.shape[0] == 0 or k.shape[0] == 0:
        return torch.zeros_like(q) + _nothing(q, k, v)
    if kernel == "auto":
        kernel = choose_kernel(q)
    if kernel not in KERNELS:
        raise ConfigurationError(f"unknown attention kernel {kernel!r}; known: auto, {', '.join(KERNELS)}")
    offsets = [cu if isinstance(cu, Offsets) else Offsets(cu, q.device) for cu in (cu_q, cu_k)]
    return KERNELS[kernel](q, k, v, *offsets, scale=scale, causal=causal)


def choose_kernel(q: Tensor) -> str:
    """What ``"auto"`` means for such a tensor."""
    if q.device.type != "cuda" or q.dtype not in HALF_DTYPES or not _has_flash_shape(q):
        return "sdpa"
    if _flash_attention() is not None:
        return "flash"
    return "varlen" if _has_torch_varlen() else "sdpa"


def _has_flash_shape(q: Tensor) -> bool:
    """What FlashAttention's kernels, torch's too, ask of head width and GPU."""
    width = q.shape[-1]
    return width % 8 == 0 and width <= MAX_FLASH_WIDTH and torch.cuda.get_device_capability(q.device) >= (8, 0)


@functools.cache
def _flash_attention() -> Callable[..., Any] | None:
    """flash-attn's function; None where the package is missing, of another generation, or built for another torch."""
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]  # optional
    except Exception:  # a broken build raises whatever its loader does
        return None
    found: Callable[..., Any] = flash_attn_varlen_func
    return found


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A zero in the graph of q, k and v: without it, backward would skip collectives that the other ranks issue."""
    return q[:0].sum() + k[:0].sum() + v[:0].sum()


@functools.cache
def _has_torch_varlen() -> bool:
    """The module came with torch 2.10, the options that are needed here later."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Offsets, cu_k: Offsets, *, scale: float | None, causal: bool
) -> Tensor:
    """One call for each run of entries of equal lengths.

    Split and not sliced, because the gradient of each slice would be a tensor as large as the whole.
    """
    bounds = zip(pairwise(cu_q.host), pairwise(cu_k.host), strict=True)
    shapes = ((b - a, d - c) for (a, b), (c, d) in bounds)
    runs = [(*shape, len(list(run))) for shape, run in groupby(shapes)]
    split_q = q.split([count * num_q for num_q, _, count in runs])
    split_k, split_v = (x.split([count * num_k for _, num_k, count in runs]) for x in (k, v))
    parts = []
    for (num_q, num_k, count), *rows in zip(runs, split_q, split_k, split_v, strict=True):
        if num_q == 0:
            continue
        if num_k == 0:
            parts.append(torch.zeros_like(rows[0]) + _nothing(q, k, v))
            continue
        batch_q, batch_k, batch_v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in rows)
        is_square = num_q == num_k
        mask = None if is_square or not causal else _up_to_own(num_q, num_k, q.device)
        out = functional.scaled_dot_product_attention(
            batch_q,
            batch_k,
            batch_v,
            attn_mask=mask,
            is_causal=causal and is_square,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _up_to_own(num_q: int, num_k: int, device: torch.device) -> Tensor:
    """(num_q, num_k): which keys each of the last ``num_q`` positions sees. SDPA's own mask counts from the first."""
    return torch.ones(num_q, num_k, dtype=torch.bool, device=device).tril(num_k - num_q)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Offsets, cu_k: Offsets, *, scale: float | None, causal: bool
) -> Tensor:
    flash = _flash_attention()
    if flash is None:
        raise ConfigurationError("the kernel 'flash' needs the package flash-attn, which cannot be imported here")
    out: Tensor = flash(
        q, k, v, cu_q.device, cu_k.device, cu_q.longest, cu_k.longest, softmax_scale=scale, causal=causal
    )
    return out


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Offsets, cu_k: Offsets, *, scale: float | None, causal: bool
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        q,
        k,
        v,
        cu_q.device,
        cu_k.device,
        cu_q.longest,
        cu_k.longest,
        scale=scale,
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=k.shape[1] != q.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


KERNELS: dict[str, Kernel] = {"sdpa": _sdpa, "flash": _flash, "varlen": _varlen}
