"""Random cases one after another, judged: does balancing change more than rounding does?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rank_pool import RankFailureError, RankPool
from soak_cases import MAX_RANKS, PRECISIONS, SoakCase, draw
from soak_run import Finding, run_case

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
"""Law 3: ‖balanced − unbalanced‖ / ‖unbalanced‖ of a tensor."""

FACTOR = 1.5
"""How much farther from float64 a tensor may be than the unbalanced run's in the same precision."""

NOISE = 1e-5
"""Tensors this much smaller than the largest of their case are sums that cancel; they count as this large."""


@dataclass(frozen=True)
class Judged:
    """One tensor: what was measured and what is allowed, relative to the tensor's norm.

    Attributes:
        apart: the balanced run's distance from the unbalanced one.
        error, own: the balanced and the unbalanced run's distance from float64.
    """

    finding: Finding
    apart: float
    error: float
    own: float
    measured: float
    limit: float

    @property
    def is_right(self) -> bool:
        return self.measured <= self.limit  # False for NaN


def judge(case: SoakCase, findings: Iterable[Finding]) -> list[Judged]:
    """All tensors of a case, except those where the unbalanced run is not finite itself."""
    found = [f for f in findings if f.size and math.isfinite(f.own_error)]
    largest = max((f.norm for f in found), default=0.0)
    owns = [f.own_error / f.norm for f in found if f.norm > 1e-3 * largest]
    typical = math.sqrt(sum(own**2 for own in owns) / len(owns)) if owns else 0.0
    return [_judge(f, case.precision, max(f.norm, NOISE * largest), typical) for f in found]


def _judge(f: Finding, precision: str, unit: float, typical: float) -> Judged:
    """float64 and float32 by law 3; by the unbalanced run's own distance from float64 in lower precision always, and in
    float32 where a tensor is a sum that cancels.

    That distance is a sum of roundings, and may be small by chance: it counts as at least the root mean square over the
    case's tensors. A norm over n random roundings scatters by about 1/√n, which is granted three times: a soak compares
    thousands of tensors, some of six elements.
    """
    apart, error, own = (x / unit if unit else x for x in (f.apart, f.error, f.own_error))
    limit = TOLERANCE.get(precision, 0.0)
    if precision == "float64" or apart <= limit:
        return Judged(f, apart, error, own, apart, limit)
    return Judged(f, apart, error, own, error, FACTOR * max(own, typical) * (1 + 3 / math.sqrt(f.size)))


@dataclass
class Tally:
    """What the cases of one precision came to. The worst figures are of single tensors, relative to their norms."""

    cases: int = 0
    tensors: int = 0
    not_finite: int = 0
    worst_apart: float = 0.0
    worst_error: float = 0.0
    worst_own: float = 0.0
    worst_of_limit: float = 0.0
    worst_seed: int = -1

    def add(self, case: SoakCase, judged: list[Judged], not_finite: int) -> None:
        self.cases, self.tensors = self.cases + 1, self.tensors + len(judged)
        self.not_finite += not_finite
        for j in judged:
            if case.precision != "float32" or j.limit == TOLERANCE["float32"]:
                self.worst_apart = max(self.worst_apart, j.apart)
            self.worst_error, self.worst_own = max(self.worst_error, j.error), max(self.worst_own, j.own)
            share = j.measured / j.limit if j.limit else 0.0
            if share > self.worst_of_limit:
                self.worst_of_limit, self.worst_seed = share, case.seed


@dataclass
class Soak:
    """The whole run."""

    seed: int
    seconds: float = 0.0
    tallies: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in PRECISIONS})
    ranks: dict[int, int] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        return sum(self.ranks.values())


def run_one(pool: RankPool, case: SoakCase, soak: Soak) -> None:
    """Run and judge a case, and note what came of it.

    Raises:
        RankFailureError: a rank raised or hung; it is noted, and the pool is closed.
    """
    soak.ranks[case.world_size] = soak.ranks.get(case.world_size, 0) + 1
    try:
        findings = [finding for of_rank in pool.run(case) for finding in of_rank]
    except RankFailureError as failure:
        soak.failures.append({"seed": case.seed, "case": str(case), "what": str(failure)})
        raise
    judged = judge(case, findings)
    soak.tallies[case.precision].add(case, judged, sum(not math.isfinite(f.own_error) for f in findings))
    wrong = [j for j in judged if not j.is_right]
    if wrong:
        lines = [
            f"{j.finding.kind} {j.finding.name}: {j.measured:.1e}, allowed {j.limit:.1e}; unbalanced {j.own:.1e}"
            for j in sorted(wrong, key=lambda j: -j.measured)[:5]
        ]
        what = "\n".join([f"{len(wrong)} of {len(judged)} tensors differ", *lines])
        soak.failures.append({"seed": case.seed, "case": str(case), "what": what})


def soak_ranks(
    world_size: int,
    seeds: Iterator[int],
    soak: Soak,
    *,
    deadline: float,
    timeout_s: float,
    wrong: str = "",
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Cases of one number of ranks until the deadline or the end of ``seeds``; ranks start anew after a failure."""
    pool: RankPool | None = None
    try:
        for seed in seeds:
            if time.monotonic() > deadline:
                return
            before = len(soak.failures)
            pool = pool or RankPool(run_case, world_size, timeout_s=timeout_s)
            try:
                run_one(pool, replace(draw(seed), wrong=wrong), soak)
            except RankFailureError:
                pool = None
            for failure in soak.failures[before:]:
                report(failure)
    finally:
        if pool is not None:
            pool.close()


def run_soak(
    *,
    seed: int,
    seconds: float,
    ranks: Iterable[int] = range(1, MAX_RANKS + 1),
    cases: int | None = None,
    timeout_s: float = 60,
    wrong: str = "",
    report: Callable[[dict[str, Any]], None] = lambda failure: None,
) -> Soak:
    """Cases of each number of ranks for an equal share of the time.

    Args:
        seed: where the cases' seeds begin.
        seconds: in all.
        cases: of each number of ranks, at most.
        timeout_s: of a case.
        wrong: a fault in every case, for the negative control.
        report: is given each failure as it is found.
    """
    soak, chosen, begin = Soak(seed), list(ranks), time.monotonic()
    for number, world_size in enumerate(chosen, start=1):
        most = 10**9 if cases is None else cases
        soak_ranks(
            world_size,
            (MAX_RANKS * (seed + i) + world_size - 1 for i in range(most)),
            soak,
            deadline=begin + seconds * number / len(chosen),
            timeout_s=timeout_s,
            wrong=wrong,
            report=report,
        )
    soak.seconds = time.monotonic() - begin
    return soak


def replay(seed: int, timeout_s: float = 60) -> tuple[SoakCase, Soak, list[Judged]]:
    """One case, with all its tensors."""
    case, soak = draw(seed), Soak(seed)
    pool = RankPool(run_case, case.world_size, timeout_s=timeout_s)
    try:
        findings = [finding for of_rank in pool.run(case) for finding in of_rank]
    except RankFailureError as failure:
        soak.failures.append({"seed": seed, "case": str(case), "what": str(failure)})
        return case, soak, []
    pool.close()
    return case, soak, judge(case, findings)
