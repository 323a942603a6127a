"""Do the same lengths give the same plans in other processes, hash seeds and versions of Python?

    python scripts/determinism.py                                # this Python, with three hash seeds
    python scripts/determinism.py --python PATH --python PATH    # and others, which have KnapFormer (NumPy is enough)

Exit code 1 if any digest differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
HASH_SEEDS = ("0", "1", "random")


def digests(python: str, hash_seed: str) -> dict[str, str]:
    """What ``plan_digests.py`` prints in a process of its own."""
    done = subprocess.run(
        [python, str(SUPPORT / "plan_digests.py")],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main(
    python: Annotated[list[str] | None, typer.Option(help="A further Python that has KnapFormer installed.")] = None,
) -> None:
    """Compare digests of plans."""
    runs = [(p, seed) for p in (sys.executable, *(python or [])) for seed in HASH_SEEDS]
    seen: dict[str, set[str]] = {}
    for path, seed in runs:
        found = digests(path, seed)
        print(f"Python {found.pop('python')}, PYTHONHASHSEED={seed}: {len(found)} digests")
        for name, digest in found.items():
            seen.setdefault(name, set()).add(digest)
    different = sorted(name for name, values in seen.items() if len(values) > 1)
    print(f"{len(runs)} runs; different: {', '.join(different) or 'none'}")
    raise typer.Exit(bool(different))


if __name__ == "__main__":
    typer.run(main)
