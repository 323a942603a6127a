"""Copies from the host to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray[Any, Any] | Tensor, device: torch.device | str) -> Tensor:
    """An array or tensor of the host on ``device``, without waiting for what CUDA has been given to do.

    From memory that is not pinned the copy would begin only after all of that, an exchange with a slow rank included.
    """
    with outliving():
        return _copied(values, torch.device(device))


def outliving() -> torch.inference_mode:
    """Under it tensors are made that may be kept: what is born in inference mode can't be saved for a backward pass."""
    return torch.inference_mode(False)


def _copied(values: np.ndarray[Any, Any] | Tensor, device: torch.device) -> Tensor:
    on_host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if not on_host.numel():  # NumPy gives empty arrays strides of 0, for which compiled code would be compiled anew
        return torch.empty(on_host.shape, dtype=on_host.dtype, device=device)
    if device.type == "cuda" and on_host.device.type == "cpu" and not on_host.requires_grad:
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)
