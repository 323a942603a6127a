"""What lengths cost, by hand, and what a fit of measurements may not give."""

from __future__ import annotations

import numpy as np
import pytest

from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel, Fit, Machine, PackSample, fit
from knapformer.plans.planners import evaluate, make_plan


def test_attention_of_a_window_grows_with_the_length_only():
    whole = CostModel(hidden=64, num_heads=4, gamma=0.5, flops_per_s=1e6)
    window = CostModel(hidden=64, num_heads=4, gamma=0.5, flops_per_s=1e6, attention_span_tokens=100)
    pair_s = 0.5 * 4 * 64 / 1e6
    lengths = [0, 50, 100, 1000]
    assert np.allclose(whole.attention_s(lengths), [pair_s * n * n for n in lengths], rtol=1e-12)
    assert np.allclose(window.attention_s(lengths), [pair_s * n * min(n, 100) for n in lengths], rtol=1e-12)
    linear_s = 24 * 64**2 / 1e6
    assert np.allclose(window.work_s(lengths), window.attention_s(lengths) + [linear_s * n for n in lengths])


def test_plans_are_made_and_priced_with_the_window():
    rows = [[40_000, 100], [], [], []]
    window = CostModel(attention_span_tokens=64)
    plan = make_plan(rows, planner="home", cost=window)
    assert evaluate(plan, window).rank_attention_s[0] == pytest.approx(float(window.attention_s([40_000, 100]).sum()))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_exchanged_bytes_are_those_of_the_elements(size):
    cost = CostModel(hidden=96, num_heads=6, machine=Machine(bytes_per_element=size))
    assert cost.bytes_per_head_token == 16 * size
    plan = make_plan([[600], [0]], planner="ulysses", cost=cost)
    # Half of the rows times half of the heads, q, k, v and the output, in both directions.
    assert evaluate(plan, cost).bytes == 2 * 4 * 300 * 3 * 16 * size


def test_a_cost_file_without_gamma_has_attention_at_the_speed_of_the_rest():
    assert CostModel.from_dict({"hidden": 64, "num_heads": 4}).gamma == 1.0
    assert CostModel.from_dict({"hidden": 64, "num_heads": 4, "gamma": 0.25}).gamma == 0.25


def packs(t0_s: float, s_per_token: float, s_per_pair: float) -> list[PackSample]:
    lengths = [(100,), (100, 100), (400,), (400, 300, 50), (1000,), (500, 500), (1600,), (800,) * 3]
    return [PackSample(n, t0_s + s_per_token * sum(n) + s_per_pair * sum(x * x for x in n)) for n in lengths]


def test_a_fit_finds_the_formula():
    found = fit(packs(1e-3, 2e-6, 3e-9))
    assert (found.t0_s, found.s_per_token, found.s_per_pair) == pytest.approx((1e-3, 2e-6, 3e-9))
    assert found.r2 == pytest.approx(1) and found.mape < 1e-9
    assert found.predict_s([10, 20]) == pytest.approx(1e-3 + 2e-6 * 30 + 3e-9 * 500)
    assert found.mape_on([PackSample((10, 20), 2 * found.predict_s([10, 20]))]) == pytest.approx(0.5)


def test_a_fit_always_has_a_speed():
    """Noisy times whose non-negative optimum has no linear term: a cost model needs one all the same."""
    exact = packs(4e-3, 1e-9, 3e-9)
    noise = [1.1, 1.1, 0.95, 0.9, 1.05, 0.9, 1.05, 0.95]
    samples = [PackSample(s.lengths_tokens, s.seconds * factor) for s, factor in zip(exact, noise, strict=True)]
    rows = np.asarray([(1, sum(s.lengths_tokens), sum(n * n for n in s.lengths_tokens)) for s in samples])
    seconds = np.asarray([s.seconds for s in samples])
    least_squares = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(samples)), rcond=None)[0]
    assert least_squares[1] < 0 < min(least_squares[0], least_squares[2])  # the case is what it claims to be
    found = fit(samples)
    assert found.s_per_token > 0 and min(found.t0_s, found.s_per_pair) >= 0
    assert found.to_cost(CostModel(hidden=64, num_heads=4)).linear_s_per_token == pytest.approx(found.s_per_token)


@pytest.mark.parametrize("term", [0, 2])
def test_no_term_of_a_fit_is_negative(term):
    """Times that only a negative term would give exactly: it becomes 0, and the others are refitted."""
    exact = [1e-3, 2e-6, 3e-9]
    exact[term] *= -0.1
    samples = packs(*exact)
    assert all(sample.seconds > 0 for sample in samples)
    found = fit(samples)
    terms = [found.t0_s, found.s_per_token, found.s_per_pair]
    assert terms[term] == 0.0 and min(terms) >= 0 and max(terms) > 0
    assert found.mape > 1e-4

    def error(candidate: np.ndarray) -> float:
        rows = [(1, sum(s.lengths_tokens), sum(n * n for n in s.lengths_tokens)) for s in samples]
        return float(((np.asarray(rows) @ candidate / [s.seconds for s in samples] - 1) ** 2).sum())

    rng = np.random.default_rng(0)
    for _ in range(200):  # nearby sums of squares are no smaller
        step = np.asarray(terms) * rng.uniform(0.98, 1.02, 3)
        step[term] = abs(exact[term]) * rng.uniform(0, 0.05)
        assert error(step) >= error(np.asarray(terms)) * (1 - 1e-12)


def test_quality_of_a_noisy_fit():
    """R² = 1 − Σ(t − t̂)² / Σ(t − t̄)², and the mean of |t̂/t − 1|."""
    noise = [1.1, 0.9, 1.05, 1.0, 0.93, 1.04, 0.98, 1.01]
    samples = [
        PackSample(s.lengths_tokens, s.seconds * factor)
        for s, factor in zip(packs(1e-3, 2e-6, 3e-9), noise, strict=True)
    ]
    found = fit(samples)
    seconds = np.asarray([s.seconds for s in samples])
    predicted = np.asarray([found.predict_s(s.lengths_tokens) for s in samples])
    r2 = 1 - ((seconds - predicted) ** 2).sum() / ((seconds - seconds.mean()) ** 2).sum()
    assert 0.5 < r2 < 0.9999 and found.r2 == pytest.approx(r2, rel=1e-12)
    assert found.mape == pytest.approx(np.abs(predicted / seconds - 1).mean(), rel=1e-12) and found.mape > 0.01


def test_bounds_of_numbers():
    for value in (1e-30, 1e30):
        assert CostModel(flops_per_s=value).flops_per_s == value
    for value, message in ((0.99e-30, "1e-30 at least"), (1.01e30, r"1e\+30 at most")):
        with pytest.raises(ConfigurationError, match=f"flops_per_s must be .*{message}"):
            CostModel(flops_per_s=value)


def test_a_fit_needs_four_packs():
    with pytest.raises(ConfigurationError, match="at least four samples, got 3"):
        fit(packs(1e-3, 2e-6, 3e-9)[:3])


@pytest.mark.parametrize("name", ["communication_scale", "latency_s", "interference"])
def test_figures_that_may_be_zero_are_no_less_and_numbers(name):
    assert getattr(Machine(**{name: 0}), name) == 0
    for wrong in (-0.5, -1, "fast", None, True, float("nan")):
        with pytest.raises(ConfigurationError, match=f"{name} must be a number >= 0, got {wrong!r}"):
            Machine(**{name: wrong})


def test_speeds_and_nodes_are_plain_numbers_whatever_they_were_given_as():
    machine = Machine(speeds=[1, 2.0], nodes=np.asarray([0, 1]))
    assert machine.speeds == (1.0, 2.0) and machine.nodes == (0, 1)
    assert {type(x) for x in machine.speeds} == {float} and {type(x) for x in machine.nodes} == {int}
    assert machine == Machine(speeds=[1.0, 2.0], nodes=[0, 1])


def test_a_fit_gives_speed_and_gamma_of_a_layers_pass():
    template = CostModel(hidden=64, num_heads=4)
    cost = fit(packs(1e-3, 2e-6, 3e-9)).to_cost(template, 6.0)
    assert cost.linear_s_per_token == pytest.approx(2e-6 / 6)
    assert float(cost.attention_s([1])[0]) == pytest.approx(3e-9 / 6)
    with pytest.raises(ConfigurationError, match="no linear term"):
        Fit(1e-3, 0.0, 3e-9, r2=1.0, mape=0.0).to_cost(template)
