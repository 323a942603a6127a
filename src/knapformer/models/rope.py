"""Rotary position embedding over several axes, from integer position ids (arXiv 2104.09864; pairs as in FLUX.1).

Rotations are complex numbers: one multiplication rotates an interleaved pair of channels, and mixed-precision wrappers
that cast floating-point inputs to bfloat16 leave complex ones as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rotations(position_ids: Tensor, axes: Sequence[int], *, theta: float, dtype: torch.dtype) -> Tensor:
    """Unit complex numbers ``exp(i · position · θ^(-2j / width))`` for channel pair j of each axis.

    Args:
        position_ids: (T, num_axes) integer ids, for example (frame, row, column).
        axes: channels of a head that each axis rotates; even numbers that sum to the head width.
        theta: base of the wavelengths.
        dtype: of the model's activations; float64 gives complex128, anything else complex64.

    Returns:
        (T, head_width / 2) complex. Angles are float64 throughout: a float32 angle is off by 1e-3 at position 10,000.

    Raises:
        ValueError: ``position_ids`` is not of that shape, or holds no integers.
    """
    if position_ids.dim() != 2 or position_ids.shape[1] != len(axes):
        raise ValueError(f"position_ids must have shape (T, {len(axes)}), got {tuple(position_ids.shape)}")
    if position_ids.is_floating_point() or position_ids.is_complex():
        raise ValueError(f"position_ids must be integers, got {position_ids.dtype}")
    angles = []
    for axis, width in enumerate(axes):
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device=position_ids.device) / width
        angles.append(position_ids[:, axis, None].to(torch.float64) * theta**-exponents)
    angle = torch.cat(angles, dim=-1)
    unit = torch.polar(torch.ones_like(angle), angle)
    return unit if dtype == torch.float64 else unit.to(torch.complex64)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate interleaved channel pairs (2j, 2j + 1) of every head.

    Args:
        x: (T, H, D) queries or keys.
        rotation: (T, D / 2) complex, from ``rotations``.

    Returns:
        (T, H, D) in the dtype of ``x``; half precision is rotated in float32.
    """
    real = torch.float64 if rotation.dtype == torch.complex128 else torch.float32
    pairs = torch.view_as_complex(x.to(real).unflatten(-1, (x.shape[-1] // 2, 2)))
    return torch.view_as_real(pairs * rotation.unsqueeze(1)).flatten(-2).to(x.dtype)
