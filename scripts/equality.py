"""Compare every family with diffusers on 1, 2 and 4 gloo ranks, and write docs/equality.md."""

from __future__ import annotations

import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from family_cases import ALL, CASES, HOMES, TOLERANCE, errors, merged, reference
from launch import run_ranks
from rank_jobs import all_families

from knapformer.adapters import FAMILIES

ROOT = Path(__file__).parents[1]
KINDS = ("output", "input gradients", "parameter gradients")
RANKS = (1, 2, 4)

TEXT = """# Equality with diffusers

Written by `python scripts/equality.py` on {date}: diffusers {diffusers}, torch {torch}, {machine}, gloo.

For each family, a small transformer with random weights in float64 is run sample by sample with diffusers' own
forward, and packed and balanced on 1, 2 and 4 ranks. {num_samples} samples of different resolutions, frames and text
lengths are loaded unevenly; plans put any tokens and any attention tiles (heads and query rows) on any rank. Each
figure is the largest ‖difference‖ / ‖reference‖ over all tensors of its kind: outputs of all samples, gradients of
latents, text and pooled text, gradients of all parameters. The tests demand {tolerance:g};
`tests/adapters/test_families.py` has the negative controls.

Several layers of diffusers compute in float32 even in a float64 model. For the comparison these casts are left out on
both sides; otherwise the table would show float32 rounding.

| family | ranks | output | input gradients | parameter gradients |
|---|---|---|---|---|
{rows}
"""


def compare(name: str, results: list[dict[Any, Any]], wanted: dict[str, Any]) -> dict[str, float]:
    return errors(merged([result[name, "full"] for result in results]), wanted)


def main() -> None:
    wanted = {name: reference(name) for name in CASES}
    found: dict[tuple[str, int], dict[str, float]] = {}
    for world_size in RANKS:
        names = list(CASES)
        results = run_ranks(all_families, world_size, names, timeout_s=300, preload=["peft", *FAMILIES.values()])
        for name in names:
            found[name, world_size] = compare(name, results, wanted[name])
        print(f"{world_size} ranks: {max(max(found[name, world_size].values()) for name in names):.1e}")
    rows = [
        f"| {name if n == RANKS[0] else ''} | {n} | " + " | ".join(f"{found[name, n][k]:.1e}" for k in KINDS) + " |"
        for name in CASES
        for n in RANKS
    ]
    assert len(ALL) == sum(map(len, HOMES[4]))
    worst = max(max(values.values()) for values in found.values())
    if worst >= TOLERANCE:
        sys.exit(f"a figure of {worst:.1e} is above {TOLERANCE:g}; nothing was written")
    machine = f"Python {platform.python_version()} on {platform.machine()} CPU"
    versions = {name: version(name) for name in ("diffusers", "torch")}
    text = TEXT.format(
        date=time.strftime("%Y-%m-%d"),
        machine=machine,
        num_samples=len(ALL),
        tolerance=TOLERANCE,
        rows="\n".join(rows),
        **versions,
    )
    (ROOT / "docs/equality.md").write_text(text)


if __name__ == "__main__":
    main()
