"""What ``balance`` refuses, and errors of one rank that all ranks raise."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")

from family_cases import ALL, CASES, balancer_of, keep_float64, stacked
from launch import run_ranks, try_ranks

from knapformer.adapters import FAMILIES, balance, cost_of, prepare, unbalance
from knapformer.adapters import diffusers as adapter
from knapformer.adapters.family import check_sources, fingerprint
from knapformer.errors import ConfigurationError, LengthsError, RankError


def build(name: str = "flux") -> tuple[Any, Any, dict[str, Any]]:
    model = CASES[name].build()
    return model, balancer_of(model), stacked(CASES[name], ALL, needs_grad=False)[1]


def test_changed_diffusers_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from knapformer.adapters.flux import FAMILY

    def forward(self: Any, x: Any) -> Any:
        return x

    monkeypatch.setattr("diffusers.models.transformers.transformer_flux.FluxTransformerBlock.forward", forward)
    model, balancer, _ = build()
    with pytest.raises(
        ConfigurationError, match=r"diffusers 0\.\S+ does not compute FluxTransformer2DModel as diffusers"
    ):
        balance(model, balancer)
    assert "forward" not in vars(model)
    balance(model, balancer, check_sources=False)
    monkeypatch.undo()
    check_sources(FAMILY, "0.42.1")
    with pytest.raises(ConfigurationError, match=r"diffusers 9\.9 .*; changed: .*FluxTransformer2DModel\.forward"):
        check_sources(FAMILY, "9.9", {})


def test_fingerprint_sees_code_and_not_comments(tmp_path: Path) -> None:
    texts = ["def f(\n    x,\n):\n    # why\n    return x + 1\n\ny = 2\n", "@(lambda g: g)\ndef f(x,):\n  return x+1\n"]
    found = []
    for i, text in enumerate([*texts, texts[0].replace("+ 1", "+ 2"), texts[0].replace("y = 2", "y = 3")]):
        file = tmp_path / f"source_{i}.py"
        file.write_text(text)
        space: dict[str, Any] = {}
        exec(compile(text, str(file), "exec"), space)
        found.append(fingerprint(space["f"]))
    assert found[0] == found[1] == found[3] != found[2]


def test_missing_name_names_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(adapter.FAMILIES, "FluxTransformer2DModel", "knapformer.adapters.no_such_family")
    with pytest.raises(ConfigurationError, match=r"the adapter of FluxTransformer2DModel does not fit diffusers 0\."):
        cost_of(build("wan")[0].__class__ and CASES["flux"].build())


def test_structure_is_checked() -> None:
    model, balancer, _ = build()
    del model.transformer_blocks[1].ff_context
    with pytest.raises(
        ConfigurationError, match=r"transformer_blocks\.1 \(FluxTransformerBlock\) .* has no ff_context"
    ):
        balance(model, balancer)

    model, balancer, _ = build()
    model.transformer_blocks[0].attn.processor = nn.Identity()
    with pytest.raises(ConfigurationError, match=r"transformer_blocks\.0\.attn has the attention processor Identity"):
        balance(model, balancer)

    model, balancer, _ = build()
    model.fuse_qkv_projections()
    with pytest.raises(ConfigurationError, match="fused projections"):
        balance(model, balancer)


def test_order_of_calls() -> None:
    model, balancer, arguments = build()
    with pytest.raises(ConfigurationError, match=r"is not balanced; call balance\(\) first"):
        unbalance(model)
    with pytest.raises(ConfigurationError, match="is not balanced"):
        prepare(model, **arguments)
    balance(model, balancer)
    with pytest.raises(ConfigurationError, match="balanced already"):
        balance(model, balancer)
    block = model.transformer_blocks[0]
    block.forward = functools.partial(block.forward)
    with pytest.raises(ConfigurationError, match="was replaced after balance"):
        unbalance(model)
    with pytest.raises(ConfigurationError, match="no adapter for Linear; there is one for FluxTransformer2DModel, Wan"):
        balance(nn.Linear(1, 1), balancer)

    model, balancer, _ = build()
    model.transformer_blocks[0].forward = functools.partial(model.transformer_blocks[0].forward)
    with pytest.raises(ConfigurationError, match=r"was replaced already; call balance\(\) first"):
        balance(model, balancer)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("name", ["qwen-image", "hunyuan-video"])
def test_keep_padding_of_a_family_that_masks_it(name: str) -> None:
    model, balancer, _ = build(name)
    with pytest.raises(ConfigurationError, match="masks padding"):
        balance(model, balancer, keep_padding=True)


def test_step_prepared_ahead() -> None:
    model, balancer, arguments = build("wan")
    balance(model, balancer)
    with torch.no_grad():
        step = prepare(model, **arguments)
        ahead, at_once = model(**arguments, step=step).sample, model(**arguments).sample
    assert step.plan.lengths.tolist() == [out.shape[1:].numel() // 4 for out in ahead]
    assert all(torch.equal(a, b) for a, b in zip(ahead, at_once, strict=True))


@pytest.mark.parametrize("name", ["wan", "flux"])
def test_a_step_for_a_batch_in_another_order(name: str) -> None:
    """As many rows, of other lengths: attention would be wrong without a word."""
    model, balancer, arguments = build(name)
    balance(model, balancer)
    step = prepare(model, **arguments)
    turned = {key: list(values)[::-1] if isinstance(values, list) else values for key, values in arguments.items()}
    with pytest.raises(LengthsError, match="rank 0: the step was prepared for "):
        model(**turned, step=step)
    model(**arguments, step=step)


BAD_INPUTS = [
    ("flux", {"hidden_states": torch.zeros(2, 16, 4)}, LengthsError, "has 6 samples, hidden_states 2"),
    ("flux", {"hidden_states": torch.zeros(16, 4)}, ConfigurationError, "takes a list of per-sample tensors"),
    ("flux", {"encoder_hidden_states": [torch.zeros(3, 10)]}, LengthsError, "has 1 samples, hidden_states 6"),
    ("flux", {"timestep": torch.zeros(5)}, LengthsError, "timestep: expected one value for each of 6 samples"),
    ("flux", {"img_ids": [torch.full((16, 3), 0.5)] * 6}, ConfigurationError, "must be whole numbers"),
    (
        "flux",
        {"img_ids": [torch.full((16, 3), 260.0, dtype=torch.bfloat16)] * 6},
        ConfigurationError,
        "must be integers, or stay below 256 in torch.bfloat16, which rounds them; got 260",
    ),
    ("wan", {"hidden_states": [torch.zeros(4, 1, 3, 4)] * 6}, LengthsError, "are no multiples of the patch"),
    ("wan", {"timestep": [torch.zeros(5)] * 6}, LengthsError, r"timestep\[0\]: expected one, or one for each of 1"),
    ("qwen-image", {"img_shapes": [[(1, 2, 2)]] * 6}, LengthsError, r"img_shapes\[0\] .* are not the 16 tokens"),
    ("sd3", {"hidden_states": [torch.zeros(4, 40, 4)] * 6}, LengthsError, "the model has 8 positions a side"),
    ("sd3", {"joint_attention_kwargs": {"scale": 0.5}}, ConfigurationError, "does not take joint_attention_kwargs"),
    ("hunyuan-video", {"pooled_projections": torch.zeros(6, 5)}, LengthsError, "expected 6 channels for each of 6"),
]


@pytest.mark.parametrize(("name", "change", "kind", "text"), BAD_INPUTS)
def test_bad_inputs(name: str, change: dict[str, Any], kind: type[Exception], text: str) -> None:
    model, balancer, arguments = build(name)
    balance(model, balancer)
    with pytest.raises(RankError, match=f"rank 0: {kind.__name__}: .*{text}") as raised:
        model(**arguments | change)
    assert isinstance(raised.value.__context__, kind)
    model(**arguments)


def bad_on_one_rank(rank: int, _world_size: int) -> None:
    model, balancer, arguments = build("wan")
    balance(model, balancer)
    model(**arguments | ({"timestep": []} if rank == 1 else {}))


def test_bad_input_on_one_rank_raises_on_all() -> None:
    outcomes = try_ranks(bad_on_one_rank, 2, timeout_s=60, preload=["torch.distributed", *FAMILIES.values()])
    for outcome in outcomes:
        assert str(outcome.error) == "rank 1: LengthsError: timestep has 0 samples, hidden_states 6"


def project(ids: list[int]) -> tuple[Any, Any, list[torch.Tensor]]:
    """FLUX after a projection that is trained with it: rows at home, its gradient, and what was projected."""
    torch.manual_seed(0)
    projector, (model, balancer, _) = nn.Linear(10, 10, dtype=torch.float64), build()
    batch, arguments = stacked(CASES["flux"], ids, needs_grad=False)
    text = [projector(sample["encoder_hidden_states"]) for sample in batch]
    balance(model, balancer)
    with keep_float64():
        output = model(**arguments | {"encoder_hidden_states": text})
        output.rows.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    return output.rows.detach(), projector.weight.grad, text


def projected_on_one_rank(rank: int, _world_size: int) -> Any:
    """Rank 1 has no sample, and cannot know that text needs gradients; it holds tokens all the same."""
    return project([0, 1, 2] if rank == 0 else [])[:2]


def test_a_rank_without_samples_takes_part_in_the_gradients_of_inputs() -> None:
    (rows, found), (nothing, none) = run_ranks(projected_on_one_rank, 2, timeout_s=60, preload=[*FAMILIES.values()])
    assert len(nothing) == 0 and none is None
    alone, expected, _ = project([0, 1, 2])
    assert torch.allclose(rows, alone, rtol=1e-9, atol=1e-11)
    assert float((found - expected).norm()) <= 1e-9 * float(expected.norm()) > 0
