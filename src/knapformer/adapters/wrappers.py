"""What trainers put around a transformer: modules that hold it, and functions that hold its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from knapformer.errors import ConfigurationError

INSIDE: dict[str, Callable[[Any], Any]] = {
    "DistributedDataParallel": lambda model: model.module,
    "FullyShardedDataParallel": lambda model: model.module,
    "OptimizedModule": lambda model: model._orig_mod,
    "PeftModel": lambda model: model.get_base_model(),
}
"""The model inside each class of wrappers, by name: importing FSDP1, Dynamo and peft takes seconds."""


def unwrapped(model: Any) -> Any:
    """The transformer inside DDP, FSDP1, ``torch.compile(model)`` and peft's ``get_peft_model``, in any order."""
    if not isinstance(model, nn.Module):
        return model
    name = next((cls.__name__ for cls in type(model).__mro__ if cls.__name__ in INSIDE), None)
    return model if name is None else unwrapped(INSIDE[name](model))


def reaches(forward: Any, function: Callable[..., Any]) -> bool:
    """Whether ``forward`` is ``function``, or was made around it, as accelerate's mixed precision is."""
    while forward is not None:
        if forward is function or getattr(forward, "__func__", None) is function:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def check_own_forward(module: nn.Module) -> None:
    """Check that nothing has replaced a module's forward before ``balance`` does.

    Raises:
        ConfigurationError: something has, with the line to move where accelerate has.
    """
    if "forward" not in module.__dict__:
        return
    name = type(module).__name__
    if "_original_forward" in module.__dict__:
        raise ConfigurationError(
            f"accelerate has wrapped the forward of a {name} for mixed precision: call balance(transformer, …) before "
            "accelerator.prepare(transformer), or give Accelerator no mixed_precision"
        )
    raise ConfigurationError(
        f"the forward of a {name} was replaced already; call balance() first, and checkpoint or compile after it"
    )
