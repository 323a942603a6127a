"""Trainers' loops: accumulation, clipping, recomputation, moving averages and saved states, as in one process."""

from __future__ import annotations

from typing import Any

import loop_cases
import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from launch import run_ranks

PRELOAD = ["peft", "accelerate", "torch.distributed.fsdp", "knapformer.adapters.flux", "knapformer.adapters.wan"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder, results = str(tmp_path_factory.mktemp("states")), {}
    for num_ranks in loop_cases.MICRO_BATCHES:
        loops = loop_cases.LOOPS | loop_cases.FAULTS
        names = [name for name, loop in loops.items() if loop.num_ranks == num_ranks]
        ranks = run_ranks(loop_cases.run_loops, num_ranks, names, folder, timeout_s=200, preload=PRELOAD)
        results |= {name: [own[name] for own in ranks] for name in names}
    return results


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Of all tensors, relative to the largest of their kind."""
    assert set(found) == set(wanted)
    scale = max(float(x.norm()) for x in wanted.values())
    return max(float((found[name] - x).norm()) / scale for name, x in wanted.items())


@pytest.mark.parametrize("name", loop_cases.LOOPS)
def test_a_loop_trains_as_one_process(found: dict[str, list[Any]], name: str) -> None:
    wanted = loop_cases.one_process(loop_cases.LOOPS[name])
    start = {n: p.detach() for n, p in loop_cases.build(loop_cases.LOOPS[name]).named_parameters() if p.requires_grad}
    assert worst(wanted["weights"], start) > 1e-3, "there is something to see"
    for own in found[name]:
        for kind, tensors in wanted.items():
            assert worst(own[kind], tensors) < 1e-10, kind
        if "resumed" in own:
            assert worst(own["resumed"], wanted["weights"]) < 1e-10
    assert ("resumed" in found[name][0]) == name.startswith("accelerate")


@pytest.mark.parametrize("name", loop_cases.FAULTS)
def test_a_loop_that_trains_something_else_is_seen(found: dict[str, list[Any]], name: str) -> None:
    loop = loop_cases.FAULTS[name]
    wanted = loop_cases.one_process(loop)
    for own in found[name]:
        weights = own["resumed"] if loop.fault == "state" else own["weights"]
        assert worst(weights, wanted["weights"]) > 1e-4
