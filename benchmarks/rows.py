"""Time and memory of what tokens share with their sequence: our lookups against torch's, at FLUX's and Wan's shapes.

Modulation (shift and scale of each sequence) and a gate, forward and backward, one thread. Torch's way is what a
model has that knows nothing of sequences in a pack: a lookup of a row for each token, whose backward adds rows one by
one in the table's own dtype. The dense way is diffusers' own, which takes one size of sequence only. Ours keeps no
row for each token and sums in float32. Errors are those of the gradient of the shift against float64. Times are
medians of turns. Writes JSON to stdout.

    python benchmarks/rows.py > benchmarks/2026-12-07-rows.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
from torch import Tensor

from knapformer import __version__
from knapformer.execution.rows import RowIndex, add_gated, modulate
from knapformer.measure.memory_probe import peak_bytes

SHAPES = {
    "flux.1-dev, one image of 1024²": (3072, [4096 + 512]),
    "flux.1-dev, 16 images of 256²": (3072, [256 + 512] * 16),
    "flux.1-dev, a split image and 40 small ones": (3072, [2304, *[128, 72, 250, 9] * 10]),
    "wan2.1-1.3b, 5 s of 480p": (1536, [32_760]),
}
Way = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    found = [
        row(name, width, lengths, dtype, turns)
        for name, (width, lengths) in SHAPES.items()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    content = {
        "command": f"python benchmarks/rows.py --turns {turns}",
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()} CPU, one thread",
        "versions": {"knapformer": __version__, "torch": torch.__version__, "Python": platform.python_version()},
        "rows": found,
    }
    print(json.dumps(content, indent=1))


def row(name: str, width: int, lengths: list[int], dtype: torch.dtype, turns: int) -> dict[str, Any]:
    """Ratios over torch's lookups, and the error of each way."""
    ways = ways_of(lengths)
    tensors = [torch.randn(n, width, dtype=dtype) for n in (sum(lengths), *[len(lengths)] * 3)]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way, call in ways.items():
            began = time.perf_counter()
            gradient_of_shift(call, tensors)
            if turn:
                seconds[way].append(time.perf_counter() - began)
    exact = gradient_of_shift(ways["torch's lookup"], [x.double() for x in tensors])
    peaks = {w: peak_bytes(lambda call=c: gradient_of_shift(call, tensors), tensors[0].device) for w, c in ways.items()}
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    base = "torch's lookup"
    return {
        "what": name,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": sum(lengths),
        "lookup_ms": 1e3 * medians[base],
        "time_over_lookup": {way: t / medians[base] for way, t in medians.items() if way != base},
        "peak_bytes_over_lookup": {way: peak / peaks[base] for way, peak in peaks.items() if way != base},
        "error_of_the_shifts_gradient": {
            way: float((gradient_of_shift(call, tensors).double() - exact).norm() / exact.norm())
            for way, call in ways.items()
        },
    }


def ways_of(lengths: list[int]) -> dict[str, Way]:
    index = RowIndex.from_counts(lengths)

    def ours(x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        return add_gated(x, modulate(x, shift, scale, index), gate, index)

    def looked_up(x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        shift, scale, gate = (table[index.rows] for table in (shift, scale, gate))
        return x + gate * (x * (1 + scale) + shift)

    def dense(x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        x = x.unflatten(0, (len(lengths), -1))
        return (x + gate[:, None] * (x * (1 + scale[:, None]) + shift[:, None])).flatten(0, 1)

    ways: dict[str, Way] = {"torch's lookup": looked_up, "ours": ours}
    return ways | ({"dense": dense} if len(set(lengths)) == 1 else {})


def gradient_of_shift(way: Way, tensors: list[Tensor]) -> Tensor:
    x, shift, scale, gate = (t.detach().requires_grad_() for t in tensors)
    weights = torch.linspace(0.5, 1.5, x.shape[1], dtype=x.dtype)
    (way(x, shift, scale, gate) * weights).sum().backward()
    assert shift.grad is not None
    return shift.grad


if __name__ == "__main__":
    main()
