"""Samples that accelerate's dispatching loader has cut: it slices each tensor of a list along its first axis."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from knapformer.errors import ConfigurationError


def check_not_cut(name: str, values: Sequence[Any]) -> None:
    """Check that per-sample tensors are not the pieces that ``DataLoaderDispatcher`` makes.

    It puts the batches of all ranks together tensor by tensor, and gives each rank a range of rows of every tensor:
    right for tensors with a batch dimension, and rows of several samples in the place of each sample here. Seen where
    such a loader is being iterated over and its tensors arrive as it gave them; not in copies of them.

    Raises:
        ConfigurationError: they are.
    """
    if not _is_dispatching():
        return
    bases = [x._base if isinstance(x, Tensor) else None for x in values]
    if len({id(base) for base in bases}) < len(bases):
        return  # parts of one tensor, which the loop itself may have split
    for i, (x, base) in enumerate(zip(values, bases, strict=True)):
        if base is not None and base.shape[1:] == x.shape[1:] and len(base) > len(x) > 0:
            raise ConfigurationError(
                f"{name}[{i}] is {len(x)} of the {len(base)} rows of a tensor that accelerate's DataLoaderDispatcher "
                "has put together of several ranks' batches and cut: samples are mixed. It is the default for iterable "
                "data sets; use Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))"
            )


def _is_dispatching() -> bool:
    """Whether a loop over such a loader is under way in this process; accelerate is not imported for it."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    if state is None or not state._shared_state:
        return False
    loader = getattr(state(), "active_dataloader", None)
    return any(cls.__name__ == "DataLoaderDispatcher" for cls in type(loader).__mro__)
