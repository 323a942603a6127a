"""What the operators of a forward and backward pass read and write, counted as they are dispatched."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorBytes(TorchDispatchMode):
    """Counts bytes that operators read and write, and how often each is called.

    A view costs nothing. An expanded tensor is read once. An operator that writes into a tensor it was given reads as
    much of that as its other arguments say, so the tensor counts as written only.

    Attributes:
        bytes_of: by operator.
        calls: by operator.
        sums: shapes of the gradients that an operator added up row by row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes_of: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.bytes_of.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        self.calls[name] += 1
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in given}
        is_view = not func._schema.is_mutable and made and all(x.untyped_storage().data_ptr() in storages for x in made)
        if not is_view and "empty" not in name:
            written = {id(x) for x in made}
            read = [x for x in given if id(x) not in written]
            self.bytes_of[name] += sum(map(distinct_bytes, [*read, *made]))
        return out


def distinct_bytes(x: Tensor) -> int:
    """Bytes of the elements of ``x``; those that are expanded count once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count * x.element_size()
