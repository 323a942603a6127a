"""What ``torch.compile`` needs to be told: graphs that serve every number of rows, and the line that works."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_shapes

from knapformer.errors import ConfigurationError

ANY_ROWS = {"backed_size_oblivious": True, "use_duck_shape": False}
"""No graph of their own for 0 rows and for 1, and none for two inputs that happen to have equally many."""


def any_number_of_rows() -> contextlib.AbstractContextManager[Any]:
    """Blocks that are compiled inside it, with ``dynamic=True``, are so for every number of rows, 0 and 1 too.

    Without it a rank is compiled for anew that has no rows in one step, or one. Nothing where blocks are compiled
    already, or not at all. A torch before 2.9 has only a part of the settings, and compiles more often.
    """
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    known = {name: value for name, value in ANY_ROWS.items() if hasattr(symbolic_shapes, name)}
    patched: contextlib.AbstractContextManager[Any] = symbolic_shapes.patch(known)  # type: ignore[attr-defined]
    return patched


def refuse_whole_model(name: str, line: str) -> None:
    """Where a whole model is being compiled whose forward plans the step and exchanges rows: refuse.

    Args:
        name: of the model.
        line: that compiles what can be compiled.

    Raises:
        ConfigurationError: a compiler traces the call.
    """
    if torch.compiler.is_compiling():
        _refuse(name, line)


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]  # torch leaves it untyped
def _refuse(name: str, line: str) -> None:
    raise ConfigurationError(
        f"a balanced {name} cannot be compiled as a whole: its forward plans the step and exchanges rows, which differ "
        f"from step to step. Compile its blocks: {line}"
    )
