"""Law 2: routing moves exactly the right rows and bytes, and restoring brings them back bitwise, on 1 to 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import routing_cases as cases
from launch import run_ranks

SEEDS = range(6)
CHECKS = {
    "tensors": cases.check_routing,
    "tensors in one call": cases.check_together,
    "streams": cases.check_streams,
    "gradients": cases.check_gradients,
    "conditioning": cases.check_conditioning,
}
CONTROLS = {
    "permute": (cases.check_routing, "permute", "wrong rows"),
    "promote": (cases.check_routing, "promote", "wrong rows"),
    "own type": (cases.check_conditioning, "own type", "wrong gradient"),
}


def check_all(rank: int, world_size: int) -> dict[str, list[str]]:
    found: dict[str, Any] = {name: check(rank, world_size, SEEDS) for name, check in CHECKS.items()}
    if world_size == 4:
        found |= {wrong: check(rank, world_size, [0, 1], wrong) for wrong, (check, *_) in CONTROLS.items()}
    return found


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def found(request) -> list[dict[str, list[str]]]:
    return run_ranks(check_all, request.param)


@pytest.mark.parametrize("check", CHECKS)
def test_holds(found, check):
    faults = [f"rank {rank}: {fault}" for rank, own in enumerate(found) for fault in own[check]]
    assert not faults, "\n".join(faults[:20])


@pytest.mark.parametrize("found", [4], indirect=True)
@pytest.mark.parametrize("wrong", CONTROLS)
def test_notices_a_wrong_transport(found, wrong):
    """The negative control: permuted rows, integers that travel as floats, sums in bfloat16."""
    faults = [fault for own in found for fault in own[wrong]]
    assert any(CONTROLS[wrong][2] in fault for fault in faults)
    assert all("bytes" not in fault for fault in faults)
