"""Links: the fit recovers latency and bandwidth of a peer; every rank measures the same links."""

from __future__ import annotations

import random
from typing import Any

import pytest
from launch import run_ranks

from knapformer.errors import ConfigurationError
from knapformer.execution.groups import BalancingGroup
from knapformer.given.cost import CostModel
from knapformer.measure.links import SENT_BYTES, fit_link, measure_links


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(20e-6, 45e9), (2e-6, 300e9), (3e-3, 1e9)])
def test_the_fit_finds_latency_per_peer_and_bandwidth(latency_s: float, bytes_per_s: float) -> None:
    rng = random.Random(0)
    samples = [(n, (7 * latency_s + n / bytes_per_s) * rng.uniform(0.98, 1.02)) for n in SENT_BYTES]
    link = fit_link(8, samples)
    assert link.latency_s == pytest.approx(latency_s, rel=0.05)
    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.05)
    assert 0 < link.mape < 0.03
    assert link.samples == tuple(samples)


def test_a_latency_is_never_below_zero() -> None:
    """Times that grow faster than the bytes would ask for one."""
    link = fit_link(2, [(n, n / 1e9 * (1 + n / 1e8)) for n in SENT_BYTES])
    assert link.latency_s == 0.0
    assert 0.8e9 < link.bytes_per_s < 1e9
    with pytest.raises(ConfigurationError, match="longer with more bytes"):
        fit_link(2, [(n, 1.0 / n) for n in SENT_BYTES])


SIZES = (1_000, 40_000, 2_000_000)


def test_every_rank_finds_the_same_links() -> None:
    everyones = run_ranks(_links, 2)
    assert everyones[0] == everyones[1]
    for kind, found in zip(("intra_node", "inter_node"), everyones[0], strict=True):
        (link,) = (found.pop(kind), *found.values())
        assert link["num_ranks"] == 2
        assert [size for size, _ in link["samples"]] == list(SIZES)
        cost = CostModel().with_machine(latency_s=link["latency_s"], inter_node_bytes_per_s=link["bytes_per_s"])
        assert CostModel.from_dict(cost.to_dict()) == cost


def _links(_rank: int, _world_size: int) -> list[dict[str, dict[str, Any]]]:
    """On one node, and on two."""
    group = BalancingGroup.create()
    kinds = [measure_links(group, ranks_per_node, SIZES) for ranks_per_node in (2, 1)]
    return [{name: link.to_dict() for name, link in found.items()} for found in kinds]
