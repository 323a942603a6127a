"""Every parser of what comes from outside on random broken contents.

    python scripts/fuzz.py                                   # 2000 contents each, minutes
    python scripts/fuzz.py --examples 300 --only "plan file"
    python scripts/fuzz.py --json benchmarks/DATE-inputs.json

Exit code 1 if a parser broke; the smallest content that broke it is in ``tests/fuzz/corpus`` then, and the test of the
corpus fails until it is mended.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "scripts")]


def main(
    examples: Annotated[int, typer.Option(help="Contents for each parser.", min=1)] = 2000,
    seed: Annotated[int, typer.Option(help="Equal seeds make equal contents.", min=0)] = 0,
    only: Annotated[str, typer.Option(help="One parser.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result there.")] = None,
) -> None:
    """Fuzz the parsers."""
    from fuzz_cases import PARSERS
    from trust import measured

    if only and only not in PARSERS:
        raise typer.BadParameter(f"--only must be one of {', '.join(PARSERS)}")
    rows = [fuzz_one(name, examples, seed) for name in PARSERS if only in ("", name)]
    if json_file:
        command = f"python scripts/fuzz.py --examples {examples} --seed {seed}" + (f" --only '{only}'" if only else "")
        json_file.write_text(json.dumps(measured(command, rows), indent=1) + "\n")
    raise typer.Exit(any(row["broken"] for row in rows))


def fuzz_one(name: str, examples: int, seed: int) -> dict[str, Any]:
    """Try one parser; keep what breaks it."""
    from fuzz_cases import CORPUS, PARSERS, BrokenParserError, fuzz

    begin = time.perf_counter()
    broken = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            counts = fuzz(PARSERS[name], Path(folder), max_examples=examples, seed=seed)
        except BrokenParserError as found:
            counts, broken = found.counts, found
    row = {
        "what": name,
        "refused": counts["refused"],
        "accepted": counts["accepted"],
        "corpus": len(list((CORPUS / name.replace(" ", "_")).glob("*"))),
        "seconds": time.perf_counter() - begin,
        "broken": None if broken is None else str(broken)[:300],
    }
    print(f"{name}: {row['refused']} refused, {row['accepted']} accepted, {row['seconds']:.0f} s", flush=True)
    if broken is not None:
        file = CORPUS / name.replace(" ", "_") / f"refused-{hashlib.sha256(broken.content).hexdigest()[:12]}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(broken.content)
        print(f"  BROKEN by {file.relative_to(ROOT)}: {broken}", flush=True)
    return row


if __name__ == "__main__":
    typer.run(main)
