"""Runs every case of ranks that disagree by a mistake (law 9), on 3 gloo ranks."""

from __future__ import annotations

import time
from typing import Any

import disagreement_cases
import published_disagreements
import torch.distributed as dist
from launch import run_ranks

from knapformer import errors
from knapformer.execution import watch

RANKS = 3
CASES = {**disagreement_cases.CASES, **published_disagreements.CASES}


def run_cases(rank: int, _world: int, names: list[str], grace_s: float) -> dict[str, tuple[str, str, float, Any]]:
    """Of each case: type and text of the error on this rank, seconds, and what was returned where there is none."""
    watch.GRACE_S, found = grace_s, {}
    for name in names:
        case = CASES[name]
        dist.barrier()
        began, value = time.monotonic(), None
        kind, text = "", ""
        try:
            value = case.run(rank, rank == case.odd)
        except errors.KnapFormerError as error:
            kind, text = type(error).__name__, str(error)
        except Exception as error:
            kind, text = f"not ours: {type(error).__name__}", str(error)
        found[name] = (kind, text, time.monotonic() - began, value)
    dist.barrier()
    return found


def run_all(names: list[str] | None = None) -> list[tuple[str, str, float]]:
    """Every mistake on 3 gloo ranks: (what differs, what the user sees, seconds), for docs/trust.md.

    Raises:
        AssertionError: ranks were told different things, or nothing.
    """
    return [(CASES[name].what, seen, seconds) for name, (seen, seconds) in run_named(names).items()]


def run_named(names: list[str] | None = None, grace_s: float = watch.GRACE_S) -> dict[str, tuple[str, float]]:
    """The same by name, where ranks wait for ``grace_s`` seconds before they look why."""
    names = list(CASES) if names is None else names
    ranks = run_ranks(run_cases, RANKS, names, grace_s, timeout_s=280)
    found = {}
    for name in names:
        kinds, texts, seconds, values = zip(*(own[name] for own in ranks), strict=True)
        case = CASES[name]
        if case.error:
            assert set(kinds) == {case.error} and len(set(texts)) == 1, (name, kinds, texts)
            seen = f"{case.error}: {texts[0]}"
        else:
            assert not any(kinds) and all(values), (name, kinds, texts, values)
            seen = "nothing: the numbers are right"
        found[name] = (seen, max(seconds))
    return found


if __name__ == "__main__":
    for what, told, took in run_all():
        print(f"{took:5.2f} s  {what}: {told}")
