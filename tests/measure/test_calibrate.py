"""Calibration recovers a machine's speed and γ from pack times, and says how well it did."""

from __future__ import annotations

import random

import pytest
import torch

from knapformer.errors import ConfigurationError
from knapformer.execution.groups import BalancingGroup
from knapformer.given.cost import CostModel
from knapformer.measure import calibrate as module
from knapformer.measure.calibrate import calibrate, default_packs, time_pack
from knapformer.models import MMDiT
from knapformer.models.presets import cost_template, make_config

GAMMA, FLOPS_PER_S, T0_S = 1.3, 40e9, 0.02


def template() -> CostModel:
    config = make_config(num_heads=7, head_width=32, num_double_blocks=1, num_single_blocks=2)
    return cost_template(config, recompute=False, bytes_per_element=4, ranks_per_node=2)


@pytest.fixture
def machine(monkeypatch):
    """Pack times as the cost model itself would have them, with a percent of noise."""
    truth = CostModel.from_dict({**template().to_dict(), "gamma": GAMMA, "flops_per_s": FLOPS_PER_S})
    rng, times = random.Random(0), []

    def run(_run_pack, pack, _group):
        work_s = float(truth.work_s(pack).sum()) * truth.num_layers * truth.pass_factor
        times.append((T0_S + work_s) * rng.uniform(0.99, 1.01))
        return times[-1]

    monkeypatch.setattr(module, "time_pack", run)
    return times


def test_speed_and_gamma_are_recovered(machine):
    ran = []
    found = calibrate(ran.append, template(), BalancingGroup.create(), packs=default_packs(2400))
    assert found.cost.gamma == pytest.approx(GAMMA, rel=0.05)
    assert found.cost.flops_per_s == pytest.approx(FLOPS_PER_S, rel=0.03)
    assert found.fit.t0_s == pytest.approx(T0_S, rel=0.3)
    assert found.held_out_mape < 0.02 and found.fit.r2 > 0.999
    assert len(machine) == 2 * (len(found.samples) + len(found.held_out)) and len(ran) == 1
    assert CostModel.from_dict(found.to_dict()["cost"]) == found.cost


def test_a_machine_of_another_law_shows_in_the_held_out_error(monkeypatch):
    monkeypatch.setattr(module, "time_pack", lambda _run, pack, _group: 1e-3 * max(pack) ** 0.5 + 1e-4 * len(pack))
    found = calibrate(lambda _pack: None, template(), BalancingGroup.create(), packs=default_packs(2400))
    assert found.held_out_mape > 0.05


def test_packs_span_what_is_trained():
    fitted, tested = default_packs(2400)
    assert max(map(max, fitted)) == 2400 and min(map(sum, fitted)) < 400
    assert not {tuple(sorted(p)) for p in fitted} & {tuple(sorted(p)) for p in tested}
    with pytest.raises(ConfigurationError, match="64 tokens at least, got 63"):
        default_packs(63)


def test_a_pack_is_timed_by_the_clock():
    ran = []
    assert 0 <= time_pack(ran.append, (3, 4), BalancingGroup.create()) < 1.0
    assert ran == [(3, 4)]


def test_all_ranks_begin_a_pack_together(monkeypatch):
    """And what the others take until then is not counted."""
    events = []
    monkeypatch.setattr(module, "wait_for_all", events.append)
    for clock in ("thread_time", "perf_counter"):
        monkeypatch.setattr(module.time, clock, lambda: events.append("clock") or float(len(events)))
    group = BalancingGroup.create()
    assert time_pack(events.append, (3, 4), group) == 2.0
    assert events == [group, "clock", (3, 4), "clock"]


def test_the_template_counts_the_models_matrix_products():
    """Twice the weights that every token of a block meets; modulation works on sequences."""
    config = make_config(num_heads=6, head_width=32, num_double_blocks=1, num_single_blocks=1)
    model = MMDiT(config)
    single = sum(p.numel() for n, p in model.single_blocks[0].named_parameters() if n.endswith("layer.weight"))
    double = sum(
        p.numel()
        for n, p in model.double_blocks[0].visual.named_parameters()
        if p.dim() == 2 and not n.startswith("modulation")
    )
    cost = cost_template(config, recompute=True, bytes_per_element=4, ranks_per_node=2)
    assert cost.linear_flops_per_token == 2 * single == 2 * double
    assert cost.num_layers == 2 and cost.pass_factor == 4.0
    assert sum(config.rope_axes) == 32 and torch.tensor(config.rope_axes).remainder(2).sum() == 0
