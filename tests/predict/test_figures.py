"""Each figure of simulations, advice and the memory model by hand: what it counts, and over what it is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from knapformer.errors import CapacityError, ConfigurationError
from knapformer.given.cost import CostModel, Machine
from knapformer.given.lengths import Lengths
from knapformer.given.shapes import model_shape
from knapformer.plans.planners import PLANNERS, evaluate, make_plan
from knapformer.plans.registry import Caps, PlannerSpec
from knapformer.predict import advise as advising
from knapformer.predict.advise import Advice, advise
from knapformer.predict.hardware import hardware
from knapformer.predict.memory import MemoryModel
from knapformer.predict.simulate import Setting, _summarize, setting_of, simulate
from knapformer.workloads.dataset import grouped_steps, random_steps

FLUX = model_shape("flux.1-dev")
HOME = PlannerSpec("home")


def flux_memory(shard_size: int = 8) -> MemoryModel:
    return MemoryModel.of_model("flux.1-dev", FLUX, shard_size=shard_size)


def test_fsdp_holds_two_gathered_layers_and_the_gradients_of_one() -> None:
    for shards in (2, 8):
        states = 11.9e9 * 16 / shards
        assert flux_memory(shards).fixed_bytes == pytest.approx(states + 3 * 11.9e9 / 57 * 2)
    assert flux_memory(1).fixed_bytes == pytest.approx(11.9e9 * 16)
    with pytest.raises(ConfigurationError, match="shard_size must be at least 1, got 0"):
        flux_memory(0)


def test_the_memory_of_a_model_has_the_width_of_its_mlp() -> None:
    found = {name: MemoryModel.of_model(name, model_shape(name), shard_size=8) for name in ("mochi-1", "flux.1-dev")}
    assert {name: (m.width, m.mlp_width) for name, m in found.items()} == {
        "mochi-1": (3072, 8192),
        "flux.1-dev": (3072, 4 * 3072),
    }


def test_fsdp_is_simulated_over_shards_that_divide_the_ranks_only() -> None:
    cost = hardware("h100").cost(FLUX)
    for num_ranks, shard_size, has_sharding in (
        (16, 8, True),
        (8, 8, True),
        (12, 8, False),
        (4, 8, False),
        (8, 1, False),
    ):
        setting = setting_of(cost, None, flux_memory(shard_size), num_ranks=num_ranks)
        assert (setting.sharding is not None) == has_sharding, (num_ranks, shard_size)
    assert setting_of(cost, None, None, num_ranks=8).sharding is None


def test_exchanged_bytes_are_those_of_all_layers_and_passes() -> None:
    """Half of the rows times half of the heads, q, k, v and the output, there and back, in every layer and pass."""
    machine = Machine(bytes_per_element=2, communication_scale=0.75)
    cost = CostModel(hidden=96, num_heads=6, num_layers=5, pass_factor=3.0, machine=machine)
    rows = simulate([Lengths.from_ranks([[600], [0]])] * 2, [HOME, PlannerSpec("ulysses")], Setting(cost))
    assert rows["home"]["exchanged_gigabytes"] == 0
    once = 2 * 4 * 300 * 3 * 16 * 2
    assert rows["ulysses"]["exchanged_gigabytes"] == pytest.approx(once * 5 * 3.0 * 0.75 / 1e9)


def test_the_speedup_is_that_of_all_steps_together() -> None:
    def step(step_s: float, **figures: float) -> dict[str, float]:
        names = ("formula_s", "lower_bound_s", "max_over_mean", "exchanged_bytes", "moved_tokens", "num_split")
        names += ("peak_tokens", "peak_tokens_over_mean", "plan_s")
        return {"step_s": step_s, **dict.fromkeys(names, 1.0), **figures}

    steps = [step(1.0, peak_tokens=7, plan_s=0.5), step(4.0, plan_s=0.1)]
    found = _summarize([*steps, step(1.0, lower_bound_s=0.2, max_over_mean=4.0, exchanged_bytes=7e9)], [2.0, 4.0, 6.0])
    assert found["speedup"] == 2.0, "not (2 + 1 + 6) / 3"
    assert (found["speedup_low"], found["speedup_high"]) == (1.0, 6.0)
    assert (found["step_s"], found["step_p95_s"]) == (2.0, pytest.approx(3.7))
    assert found["over_lower_bound"] == 4.0 and found["timeline_over_formula"] == 2.0
    assert found["discrepancy"] == 1.0 and found["exchanged_gigabytes"] == pytest.approx((7e9 + 2) / 3e9)
    assert found["peak_tokens"] == 7
    assert (found["plan_ms"], found["plan_ms_worst"]) == (500.0, 1000.0)


def test_peak_memory_is_that_of_the_fullest_rank_in_the_fullest_step() -> None:
    memory = flux_memory()
    setting = Setting(hardware("h100").cost(FLUX), memory, memory_bytes=memory.peak_bytes(5000))
    steps = [Lengths.from_ranks(rows) for rows in ([[10], [20]], [[9000], [3]], [[400], [5000]])]
    rows = simulate(steps, [HOME], setting)
    assert rows["home"]["peak_memory_gigabytes"] == pytest.approx(memory.peak_bytes(9000) / 1e9)
    assert rows["home"]["peak_tokens"] == 9000
    assert rows["home"]["steps_over_memory"] == 1, "what just fits is not over it"


COST = hardware("h100").cost(FLUX)
MIXED = [256] * 80 + [4096] * 40 + [50_000] * 4


def advice_for(tokens: Sequence[int], *, latency_s: float = 0.0, memory_bytes: float = 80e9, **options: Any) -> Advice:
    memory = flux_memory()
    arguments = {"num_ranks": 4, "num_steps": 3, "tokens_per_rank": 40_000, **options}
    setting = Setting(COST, memory, None, latency_s)
    return advise(np.asarray(tokens), setting, memory, memory_bytes=memory_bytes, **arguments)


def test_the_longest_sample_is_refused_where_all_ranks_together_just_cannot_hold_it() -> None:
    most = 4 * flux_memory().tokens_that_fit(80e9)
    found = advice_for([most], num_steps=1, tokens_per_rank=100)
    assert (found.longest_ranks, found.longest_tokens) == (4, most)
    with pytest.raises(CapacityError, match="1 too many"):
        advice_for([most + 1], num_steps=1, tokens_per_rank=100)


def test_ranks_and_seconds_of_the_longest_sample() -> None:
    fits = flux_memory().tokens_that_fit(80e9)
    for longest, ranks in ((100, 1), (fits, 1), (fits + 1, 2), (2 * fits, 2), (2 * fits + 1, 3)):
        found = advice_for([50, longest], num_steps=1)
        alone = float(COST.work_s([longest]).sum()) * 57 * COST.pass_factor
        assert found.longest_ranks == ranks
        assert found.longest_s == pytest.approx((alone, alone / 4))


def test_rates_are_tokens_over_the_time_of_the_steps_they_were_drawn_for() -> None:
    found = advice_for(MIXED)
    options: Any = {"num_ranks": 4, "tokens_per_rank": 40_000, "num_steps": 3}
    for name, make in (("home", random_steps), ("length-grouped", grouped_steps)):
        steps = make(np.asarray(MIXED), **options, rng=np.random.default_rng(0))
        seconds = [evaluate(make_plan(s, planner="home", cost=COST), COST).step_time_s for s in steps]
        rate = sum(s.num_tokens for s in steps) / sum(seconds)
        assert found.ways[name]["tokens_per_s"] == pytest.approx(rate, rel=1e-6)
    assert found.ways["home"]["gain"] == 1.0
    ratio = found.ways["length-grouped"]["tokens_per_s"] / found.ways["home"]["tokens_per_s"]
    assert found.ways["length-grouped"]["gain"] == pytest.approx(ratio) != pytest.approx(1.0, abs=1e-3)


def test_the_latency_of_exchanges_is_part_of_the_rates() -> None:
    without, with_latency = (advice_for(MIXED, latency_s=latency).ways for latency in (0.0, 0.01))
    assert with_latency["home"]["tokens_per_s"] == pytest.approx(without["home"]["tokens_per_s"])
    assert with_latency["bags:g4n1"]["tokens_per_s"] < 0.99 * without["bags:g4n1"]["tokens_per_s"]


def test_planners_that_keep_caps_are_given_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def make(lengths: Lengths, *, planner: str, max_tokens_per_rank: Any, **options: Any) -> Any:
        given[planner] = max_tokens_per_rank
        return make_plan(lengths, planner=planner, max_tokens_per_rank=max_tokens_per_rank, **options)

    monkeypatch.setattr(advising, "make_plan", make)
    advice_for([200] * 20)
    fits = flux_memory().tokens_that_fit(80e9)
    assert {"home", "whole", "moldable", "bags"} <= set(given)
    assert given == {name: None if PLANNERS[name].caps is Caps.IGNORES else fits for name in given}
    assert given["whole"] == given["moldable"] == fits and given["home"] is None


def test_a_gain_is_given_with_two_standard_errors_and_its_extremes() -> None:
    way = advising._way(2.0, 7.0, [10.0, 4.0, 9.0], [10.0, 2.0, 3.0])
    assert way["tokens_per_s"] == 14.0 and way["gain"] == 2.0
    assert way["gain_error"] == pytest.approx(2 * 1.0 / math.sqrt(3))
    assert (way["gain_low"], way["gain_high"]) == (1.0, 3.0)
    assert math.isinf(advising._way(1.0, 1.0, [1.0], [1.0])["gain_error"])


@pytest.mark.parametrize(
    ("gains", "advised"),
    [
        ({"home": 1.0, "length-grouped": 3.0, "moldable": 2.0}, "moldable"),
        ({"home": 1.0, "whole": 1.981, "moldable": 2.0}, "whole"),
        ({"home": 1.0, "whole": 1.979, "moldable": 2.0}, "moldable"),
        ({"home": 0.995, "whole": 1.0, "moldable": 1.0}, "home"),
        ({"length-grouped": 3.0}, None),
    ],
)
def test_the_fastest_planner_is_advised_or_one_that_is_simpler_by_a_hundredth(
    gains: dict[str, float], advised: str | None
) -> None:
    assert advising._advised({name: {"gain": gain} for name, gain in gains.items()}) == advised
