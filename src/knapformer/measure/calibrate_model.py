"""``knapformer calibrate``: fit the cost model to packs of sequences on one device, and test it on packs left out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel, Fit, PackSample, fit
from knapformer.measure.calibrate import Pack
from knapformer.measure.runner import ModelRunner, Stopwatch, seconds_of

SHORTEST_TOKENS = 128
NUM_FITTED, NUM_HELD_OUT = 16, 10
TIMES_BUDGET = 2
"""Of the budget, for the estimate of one pass over the longest pack that is asked for."""

SHORTER = "ask for shorter packs (--longest; --scale of replay)"

PROBE_SHARE = 1 / 40
"""Of the time budget, for one pass over the longest pack."""


@dataclass(frozen=True, slots=True)
class ModelCalibration:
    """A cost model, and how well it predicts packs that it was not fitted to.

    Attributes:
        cost: with this device's speed and γ.
        fit: of forward and backward of the stand-in.
        held_out_mape: mean absolute error, as a fraction.
        held_out_worst: the largest error.
        samples, held_out: what was measured.
        longest_tokens: of any pack.
        reference_s: what the stopwatch's reference took; times that are compared with the fit must count in the same.
        seconds: what it took.
    """

    cost: CostModel
    fit: Fit
    held_out_mape: float
    held_out_worst: float
    samples: tuple[PackSample, ...]
    held_out: tuple[PackSample, ...]
    longest_tokens: int
    reference_s: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For a cost file's ``measured``."""
        return {name: value for name, value in asdict(self).items() if name != "cost"}


def make_packs(longest_tokens: int, seed: int = 0) -> tuple[list[Pack], list[Pack]]:
    """Packs to fit and packs to test: of 128 tokens to all that fit, in one to many sequences, drawn log-uniformly.

    Small packs matter: in them the time shows that does not depend on tokens.

    Raises:
        ConfigurationError: the longest is too short to tell the terms apart.
    """
    if longest_tokens < 4 * SHORTEST_TOKENS:
        raise ConfigurationError(f"calibration needs packs of {4 * SHORTEST_TOKENS} tokens, got {longest_tokens}")
    rng = random.Random(seed)
    singles: list[Pack] = [(round(longest_tokens * share),) for share in (1.0, 0.75, 0.5, 0.3)]
    singles += [(SHORTEST_TOKENS,), (2 * SHORTEST_TOKENS,)]

    def log_uniform(low: int, high: int) -> int:
        drawn: int = round(low * (max(high, low) / low) ** rng.random())
        return drawn

    def drawn(total: int, most: int) -> Pack:
        pack: list[int] = []
        while total >= SHORTEST_TOKENS:
            pack.append(log_uniform(SHORTEST_TOKENS, min(total, most)))
            total -= pack[-1]
        return tuple(pack)

    def new_pack() -> Pack:
        while True:
            total = log_uniform(SHORTEST_TOKENS, longest_tokens)
            pack = drawn(total, round(total * rng.choice((0.1, 0.25, 0.5, 1.0))))
            if pack not in packs:
                return pack

    packs = singles + [drawn(longest_tokens // share, 2 * SHORTEST_TOKENS) for share in (1, 3)]
    while len(packs) < NUM_FITTED + NUM_HELD_OUT:
        packs.append(new_pack())
    return packs[:NUM_FITTED], packs[NUM_FITTED:]


def calibrate_model(
    runner: ModelRunner,
    *,
    budget_s: float = 60.0,
    repeats: int = 3,
    longest_tokens: int | None = None,
    on_pack: Callable[[], None] = lambda: None,
) -> ModelCalibration:
    """Time packs and fit; a pack's time is its median over repeats, which are interleaved.

    Args:
        runner: what is timed.
        budget_s: roughly what it may take; decides the longest pack where ``longest_tokens`` is not given.
        repeats: of each pack.
        longest_tokens: of any pack.
        on_pack: called after each of ``repeats`` × (``NUM_FITTED`` + ``NUM_HELD_OUT``) measurements.

    Raises:
        ConfigurationError: packs are too short, too long for the budget or the memory, or their times give no linear
            term.
    """
    began = time.perf_counter()
    longest = find_longest(runner, budget_s * PROBE_SHARE) if longest_tokens is None else longest_tokens
    fitted, tested = make_packs(longest)
    _check_longest(runner, longest, TIMES_BUDGET * budget_s)
    try:
        runner.train(max(fitted, key=sum))
    except RuntimeError as error:
        if "memory" not in str(error).lower():
            raise
        raise ConfigurationError(f"a pack of {longest:,} tokens does not fit the memory here: {SHORTER}") from None
    watch = Stopwatch(runner)
    times: dict[Pack, list[float]] = {pack: [] for pack in (*fitted, *tested)}
    for _ in range(repeats):
        for pack, units in times.items():
            units.append(watch.units(partial(runner.train, pack)))
            on_pack()
    samples = {pack: PackSample(pack, watch.seconds(units)) for pack, units in times.items()}
    found = fit([samples[pack] for pack in fitted])
    template = runner.template
    held_out = [samples[pack] for pack in tested]
    errors = [abs(found.predict_s(s.lengths_tokens) / s.seconds - 1) for s in held_out]
    return ModelCalibration(
        cost=found.to_cost(template, template.num_layers * template.pass_factor),
        fit=found,
        held_out_mape=found.mape_on(held_out),
        held_out_worst=max(errors),
        samples=tuple(samples[pack] for pack in fitted),
        held_out=tuple(held_out),
        longest_tokens=longest,
        reference_s=watch.reference_s,
        seconds=time.perf_counter() - began,
    )


def _check_longest(runner: ModelRunner, longest_tokens: int, most_s: float) -> None:
    """Time a short pack, and estimate from below what one pass over the longest takes: in proportion.

    Raises:
        ConfigurationError: more than ``most_s``.
    """
    tokens = 4 * SHORTEST_TOKENS
    runner.train([tokens])
    least_s = seconds_of(partial(runner.train, [tokens]), runner.device) * longest_tokens / tokens
    if least_s > most_s:
        raise ConfigurationError(
            f"a pass over {longest_tokens:,} tokens would take {least_s:,.0f} s or more, the budget allows "
            f"{most_s:,.0f}: {SHORTER}, or raise --budget"
        )


def find_longest(runner: ModelRunner, pass_s: float) -> int:
    """Tokens of one sequence whose forward and backward pass takes about ``pass_s``: a power of two times 512.

    Raises:
        ConfigurationError: not even the shortest fits.
    """
    tokens = 4 * SHORTEST_TOKENS
    runner.train([tokens])
    if seconds_of(lambda: runner.train([tokens]), runner.device) > pass_s:
        raise ConfigurationError(f"a pass over {tokens} tokens takes longer than {pass_s:.3g} s; raise --budget")
    while True:
        longer = 2 * tokens
        try:
            seconds = seconds_of(partial(runner.train, [longer]), runner.device)
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            return tokens
        if seconds > pass_s:
            return tokens
        tokens = longer
