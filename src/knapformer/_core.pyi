"""The planners and the evaluator in C++ (csrc/)."""

from typing import Any

import numpy as np
import numpy.typing as npt

_I32 = npt.NDArray[np.int32]
_I64 = npt.NDArray[np.int64]
_F64 = npt.NDArray[np.float64]
_I8 = npt.NDArray[np.int8]
_Columns = tuple[_I8, _I64, _I32, _I64, _I64, _I64, _I32, _I32, _I32, _I64, _I64]
_Found = tuple[_Columns, str]
"""Columns, and why the planner chose them."""

class Problem:
    def __init__(
        self,
        lengths: _I64,
        homes: _I32,
        attention_s: _F64,
        linear_s_per_token: float,
        num_heads: int,
        speeds: _F64,
        nodes: _I32,
        intra_bytes_per_s: float,
        inter_bytes_per_s: float,
        communication_scale: float,
        bytes_per_head_token: float,
        latency_s: float,
        interference: float,
        link_margin: float,
        max_tokens: _I64 | None,
        effort: int,
    ) -> None: ...

def evaluate(problem: Problem, columns: tuple[npt.NDArray[Any], ...]) -> dict[str, Any]: ...
def deal_lanes(problem: Problem, columns: tuple[npt.NDArray[Any], ...]) -> _I8: ...
def home(problem: Problem) -> _Found: ...
def whole(problem: Problem) -> _Found | None: ...
def ulysses(problem: Problem) -> _Found: ...
def bags(problem: Problem, bag_sizes: list[int]) -> _Found: ...
def moldable(problem: Problem) -> _Found: ...
def two_lanes(problem: Problem) -> _Found: ...
