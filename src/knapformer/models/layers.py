"""The parts that DiT and MMDiT share. Tokens are packed rows: ``T`` local tokens of ``S`` sequences, possibly none."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from knapformer.execution.rows import RowIndex, modulate, rows  # noqa: F401 - where models look for the lookup

NORM_EPS = 1e-6


class Attention(Protocol):
    """Attention over packed rows. Who attends to whom is the callable's business, not the model's.

    It may have ``lanes``: then the rows of each lane lie together, and blocks take turns between them
    (``knapformer.execution.turns``).
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False) -> Tensor:
        """q (T, H, D); k, v (T, Hkv, D); returns (T, H, D). ``scale`` None means 1/√D."""
        ...


def layer_norm(x: Tensor) -> Tensor:
    """Layer norm of (T, C) without parameters; modulation takes their place."""
    return functional.layer_norm(x, x.shape[-1:], eps=NORM_EPS)


def rms_norm(x: Tensor) -> Tensor:
    """RMS norm of (T, C) without parameters; modulation takes their place."""
    return functional.rms_norm(x, x.shape[-1:], eps=NORM_EPS)


def timestep_embedding(
    t: Tensor, num_channels: int, *, max_period: float = 10_000.0, time_scale: float = 1000.0
) -> Tensor:
    """Sinusoidal features of diffusion times (Vaswani et al., arXiv 1706.03762; the scale is FLUX.1's).

    Args:
        t: (S,) floating times, 0 is clean and 1 is noise.
        num_channels: even.
        max_period: longest wavelength, in scaled time.
        time_scale: scaled time of t = 1.

    Returns:
        (S, num_channels) cosines, then sines, in the dtype of ``t``.

    Raises:
        ValueError: ``num_channels`` is odd.
    """
    if num_channels % 2:
        raise ValueError(f"num_channels must be even, got {num_channels}")
    half = num_channels // 2
    exponents = torch.arange(half, dtype=torch.float64, device=t.device) / half
    angles = (time_scale * t.to(torch.float64))[:, None] * torch.exp(-math.log(max_period) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(t.dtype)


class VectorEmbedder(nn.Module):
    """(S, in_channels) conditioning to (S, width): linear, SiLU, linear."""

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(in_channels, width)
        self.out_layer = nn.Linear(width, width)

    def forward(self, vector: Tensor) -> Tensor:
        embedded: Tensor = self.out_layer(functional.silu(self.in_layer(vector)))
        return embedded


class Modulation(nn.Module):
    """``num_outputs`` shift, scale and gate vectors per sequence, from its conditioning (adaLN, arXiv 2212.09748)."""

    def __init__(self, width: int, num_outputs: int) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        self.linear = nn.Linear(width, num_outputs * width)

    def forward(self, conditioning: Tensor) -> tuple[Tensor, ...]:
        """(S, width) to ``num_outputs`` tensors (S, width)."""
        parts: tuple[Tensor, ...] = self.linear(functional.silu(conditioning)).chunk(self.num_outputs, dim=-1)
        return parts


class HeadNorm(nn.Module):
    """Splits fused projections into heads and RMS-normalizes each query and key (QK-norm, arXiv 2302.05442)."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.head_counts = [num_heads, num_kv_heads, num_kv_heads]
        self.query_norm = nn.RMSNorm(head_width, eps=NORM_EPS)
        self.key_norm = nn.RMSNorm(head_width, eps=NORM_EPS)

    @property
    def num_channels(self) -> int:
        """Channels of the fused projection."""
        return sum(self.head_counts) * self.head_width

    def forward(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(T, num_channels) to q (T, H, D), k (T, Hkv, D), v (T, Hkv, D)."""
        heads = qkv.unflatten(-1, (sum(self.head_counts), self.head_width))
        q, k, v = heads.split(self.head_counts, dim=1)
        return self.query_norm(q), self.key_norm(k), v


class GeluMLP(nn.Module):
    """Linear, tanh-GELU, linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(width, hidden)
        self.out_layer = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out_layer(functional.gelu(self.in_layer(x), approximate="tanh"))
        return out


class SwiGLU(nn.Module):
    """``W3(silu(W1 x) · W2 x)`` (Shazeer, arXiv 2002.05202), W1 and W2 in one matrix, without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(width, 2 * hidden, bias=False)
        self.out_layer = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.in_layer(x).chunk(2, dim=-1)
        out: Tensor = self.out_layer(functional.silu(gate) * value)
        return out


class OutputLayer(nn.Module):
    """Modulated norm, then the projection to the output channels."""

    def __init__(self, width: int, out_channels: int) -> None:
        super().__init__()
        self.modulation = Modulation(width, 2)
        self.linear = nn.Linear(width, out_channels)

    def forward(self, normed: Tensor, conditioning: Tensor, index: Tensor | RowIndex) -> Tensor:
        """Normed tokens (T, width), conditioning (S, width), index (T,) to (T, out_channels)."""
        shift, scale = self.modulation(conditioning)
        out: Tensor = self.linear(modulate(normed, shift, scale, index))
        return out


@torch.no_grad()
def initialize(model: nn.Module, *, init_std: float | None = None) -> None:
    """Draw all parameters of ``model`` anew from torch's global generator.

    Args:
        model: a module whose parameters belong to linear layers and RMS norms.
        init_std: None is the training init of DiT (arXiv 2212.09748): Xavier weights, no biases, norms of scale 1, and
            zeros for the modulation and output matrices, so that every block starts as the identity. A number draws
            weights, biases and the norms' deviations from 1 from N(0, init_std²): no gradient is then zero by design.
    """
    zeroed = {id(m.linear) for m in model.modules() if isinstance(m, Modulation | OutputLayer)}
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            nn.init.normal_(module.weight, 1.0, init_std or 0.0)
        elif isinstance(module, nn.Linear):
            if init_std is not None:
                nn.init.normal_(module.weight, 0.0, init_std)
            elif id(module) in zeroed:
                nn.init.zeros_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.normal_(module.bias, 0.0, init_std or 0.0)
