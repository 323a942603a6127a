"""diffusers' ``compile_repeated_blocks`` on balanced transformers; ``scripts/compiled.py`` has every family."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("diffusers")

from compile_cases import FAMILY_STEPS, Compiled, compare_families
from family_cases import CASES, balancer_of, stacked
from launch import run_ranks

from knapformer.adapters import balance
from knapformer.errors import ConfigurationError

NAMES = ["flux"]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Compiled]]:
    return run_ranks(partial(compare_families, checkpoint=True), 2, NAMES, timeout_s=250)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_equal_the_uncompiled_run(two_ranks: list[dict[str, Compiled]], name: str) -> None:
    for rank, found in enumerate(two_ranks):
        assert max(found[name].errors) <= 1e-10, f"rank {rank}: {found[name].errors}"


@pytest.mark.parametrize("name", NAMES)
def test_graphs_serve_all_steps(two_ranks: list[dict[str, Compiled]], name: str) -> None:
    for found in two_ranks:
        assert found[name].breaks == 0
        assert found[name].num_runs >= 4 * len(FAMILY_STEPS), "of each of four blocks"
        assert found[name].graphs[0] > 0
        assert found[name].recompiled <= 2, found[name].graphs


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_a_whole_transformer_is_refused_with_the_line_to_use(name: str) -> None:
    model = CASES[name].build()
    line = "compile_repeated_blocks" if name == "flux" else "for block in transformer.transformer_blocks"
    compiled = torch.compile(balance(model, balancer_of(model)), backend="eager")
    _, arguments = stacked(CASES[name], [0, 1], False)
    with pytest.raises(ConfigurationError, match=line):
        compiled(**arguments)
