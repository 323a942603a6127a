"""Batched tensors as bucket loaders give them: a batch is the list of its samples, and comes back as diffusers' own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from family_cases import CASES, TOLERANCE, as_batch, balancer_of, errors, keep_float64, one_size, run_batch

from knapformer.adapters import balance
from knapformer.errors import ConfigurationError, RankError

IDS = [0, 3, 1]
"""Of the edit cases, sample 1 has other images than 0 and 3."""
MASKED = {"qwen-image": "encoder_hidden_states_mask", "hunyuan-video": "encoder_attention_mask"}


def changes(name: str, ids: list[int]) -> dict[str, Any]:
    """Text padded to the longest of the batch, where the family has a mask."""
    if name not in MASKED:
        return {}
    return {MASKED[name]: torch.arange(5) < torch.tensor([2 + i % 4 for i in ids])[:, None]}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_the_list_of_its_samples(name: str) -> None:
    case, ids = CASES[name], IDS[:2] if "edit" in name or "layered" in name else IDS
    model = case.build()
    with one_size():
        wanted = run_batch(case, case.build(), ids, **changes(name, ids))
        found = run_batch(case, balance(model, balancer_of(model)), ids, **changes(name, ids))
    assert found["outputs"][""].shape == wanted["outputs"][""].shape
    worst = errors(found, wanted)
    assert max(worst.values()) < TOLERANCE, worst
    turned = {**wanted, "outputs": {"": wanted["outputs"][""].flip(0)}}
    assert errors(found, turned)["output"] > 1e-3


@pytest.mark.parametrize("name", ["flux", "wan", "sd3", "qwen-image", "hunyuan-video"])
def test_what_changes_nothing_is_taken(name: str) -> None:
    """As diffusers' scripts and other trainers call it: scales of 1, and single values for all samples."""
    case = CASES[name]
    model = case.build()
    key = "joint_attention_kwargs" if name in ("flux", "sd3") else "attention_kwargs"
    extras = {
        "flux": {"controlnet_block_samples": None, "controlnet_blocks_repeat": False, "guidance": torch.full([1], 3.5)},
        "qwen-image": {"guidance": None, "img_shapes": [[(1, 4, 6)]]},
        "hunyuan-video": {"guidance": torch.full([1], 3500.0).double()},
    }.get(name, {})
    extras["timestep"] = torch.full([1], 0.25, dtype=torch.float64)
    balanced = balance(case.build(), balancer_of(model))
    with one_size(), torch.no_grad(), keep_float64():
        arguments = as_batch(case, IDS, **extras)
        wanted = model(**arguments).sample
        for scale in ({"scale": 1.0}, {}, None):
            found = balanced(**arguments, **{key: scale}).sample
            assert (found - wanted).norm() < TOLERANCE * wanted.norm()
        for refused in ({"scale": 0.5}, {"ip_adapter_image_embeds": []}):
            text = re.escape(f"does not take {key} other than {{'scale': 1.0}}")
            with pytest.raises(RankError, match=text):
                balanced(**arguments, **{key: refused})


def test_arguments_by_position() -> None:
    """In diffusers' order, with those after the inputs, too."""
    case = CASES["flux"]
    model = balance(case.build(), balancer_of(case.build()))
    with one_size(), torch.no_grad():
        arguments = as_batch(case, IDS)
        names = "hidden_states encoder_hidden_states pooled_projections timestep img_ids txt_ids guidance"
        inputs = [arguments[name] for name in names.split()]
        wanted = model(**arguments).sample
        (found,) = model(*inputs, None, None, None, False)
        assert torch.equal(found, wanted)
        with pytest.raises(RankError, match="forward got timestep by position and by name"):
            model(*inputs, timestep=arguments["timestep"])
        with pytest.raises(RankError, match="forward takes 12 arguments, got 13"):
            model(*inputs, *[None] * 6)
        with pytest.raises(RankError, match="a balanced model does not take controlnet_block_samples"):
            model(*inputs, controlnet_block_samples=[inputs[0]])


def test_ids_of_other_tokens_are_refused() -> None:
    """On all ranks, before any token moves."""
    case = CASES["flux"]
    model = balance(case.build(), balancer_of(case.build()))
    with one_size():
        arguments = as_batch(case, IDS)
        ids = arguments["img_ids"]
        with pytest.raises(RankError, match=r"img_ids\[0\] has ids of 23 tokens, hidden_states\[0\] 24 tokens"):
            model(**arguments | {"img_ids": ids[1:]})
        with pytest.raises(RankError, match=r"txt_ids\[1\] has ids of 24 tokens, encoder_hidden_states\[1\] 5 tokens"):
            model(**arguments | {"txt_ids": [arguments["txt_ids"], ids, ids]})
        with pytest.raises(RankError, match="takes a list of per-sample tensors") as raised:
            model(**arguments | {"hidden_states": arguments["hidden_states"][0]})
    assert isinstance(raised.value.__context__, ConfigurationError)
