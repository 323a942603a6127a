"""Random balanced steps against unbalanced ones, for as long as you like.

    make soak                                  # ten minutes
    python scripts/soak.py --seconds 60 --seed 7 --json soak.json
    python scripts/soak.py --replay 1234       # the case with this seed, tensor by tensor

Exit code 1 if a case fails; each failure names the seed that replays it.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/support"))

SCHEMA = "knapformer.soak/1"


def main(
    seconds: Annotated[float, typer.Option(help="How long, over all numbers of ranks.")] = 600,
    seed: Annotated[int | None, typer.Option(help="Where the cases' seeds begin; by default the time.")] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, from 1 to 8.")] = "1,2,3,4,5,6,7,8",
    timeout: Annotated[float, typer.Option(help="Seconds after which a case counts as hung.")] = 60,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result there.")] = None,
    replay: Annotated[int | None, typer.Option(help="Run the case with this seed only.")] = None,
) -> None:
    """Random cases, balanced against unbalanced."""
    import soak

    if replay is not None:
        raise typer.Exit(replay_one(replay, timeout))
    seed = int(time.time()) % 10**8 if seed is None else seed
    chosen = [int(part) for part in ranks.split(",")]
    print(f"seed {seed}, {seconds:g} s", flush=True)
    found = soak.run_soak(seed=seed, seconds=seconds, ranks=chosen, timeout_s=timeout, report=show_failure)
    show(found)
    if json_file:
        command = f"python scripts/soak.py --seconds {seconds:g} --seed {seed} --ranks {ranks}"
        json_file.write_text(
            json.dumps(as_json(found, command, {**soak.TOLERANCE, "factor": soak.FACTOR}), indent=1) + "\n"
        )
    raise typer.Exit(bool(found.failures))


def show_failure(failure: dict[str, Any]) -> None:
    print(
        f"\nFAILED: python scripts/soak.py --replay {failure['seed']}\n{failure['case']}\n{failure['what']}", flush=True
    )


def show(found: Any) -> None:
    print(f"\n{found.num_cases} cases in {found.seconds:.0f} s, {len(found.failures)} failed")
    print("precision   cases  tensors  apart    from float64  unbalanced's  share of what is allowed (seed)")
    for name, tally in found.tallies.items():
        if tally.cases:
            print(
                f"{name:10} {tally.cases:6} {tally.tensors:8}  {tally.worst_apart:.1e}  {tally.worst_error:12.1e} "
                f"{tally.worst_own:13.1e}  {tally.worst_of_limit:.2g} ({tally.worst_seed})"
            )


def replay_one(seed: int, timeout: float) -> int:
    import soak

    case, found, judged = soak.replay(seed, timeout)
    print(case)
    for j in judged:
        mark = " " if j.is_right else "WRONG"
        print(f"{j.finding.kind} {j.finding.name}: {j.measured:.1e} of {j.limit:.1e}; unbalanced {j.own:.1e} {mark}")
    for failure in found.failures:
        print(failure["what"])
    return int(bool(found.failures) or not all(j.is_right for j in judged))


def as_json(found: Any, command: str, allowed: dict[str, float]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()} CPU, {torch.get_num_threads()} thread per rank, gloo",
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        "cases": found.num_cases,
        "allowed": allowed,
        **asdict(found),
    }


if __name__ == "__main__":
    typer.run(main)
