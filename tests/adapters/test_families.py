"""Every family, packed and balanced, equals diffusers' own forward sample by sample."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("peft")

import rank_jobs
from family_cases import (
    ALL,
    CASES,
    MAIN_CASES,
    TOLERANCE,
    balanced,
    balancer_of,
    errors,
    keep_float64,
    merged,
    one_size,
    parameter_gradients,
    reference,
    run_batch,
    stacked,
)
from launch import run_ranks
from torch import nn

from knapformer.adapters import FAMILIES, balance, unbalance

PRELOAD = ["peft", "torch.distributed.fsdp", *FAMILIES.values()]
"""Slow to import."""

ON_FOUR_RANKS = [*MAIN_CASES.values(), "wan-per-token-timesteps", "qwen-image-edit"]


class References(dict[str, Any]):
    """diffusers' own results by case, made when they are first asked for."""

    def __missing__(self, name: str) -> Any:
        self[name] = reference(name)
        return self[name]


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return References()


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[Any, Any]]:
    return run_ranks(rank_jobs.everything, 2, list(CASES), timeout_s=120, preload=PRELOAD)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[Any, Any]]:
    return run_ranks(rank_jobs.all_families, 4, ON_FOUR_RANKS, timeout_s=120, preload=PRELOAD)


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    worst = errors(found, wanted)
    assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.parametrize("name", CASES)
def test_one_rank(name: str, references: dict[str, Any]) -> None:
    assert_equal(balanced(name, ALL), references[name])


@pytest.mark.parametrize("homes", ["full", "empty"])
@pytest.mark.parametrize("name", CASES)
def test_two_ranks(two_ranks: Any, references: dict[str, Any], name: str, homes: str) -> None:
    assert_ranks_equal([result[name, homes] for result in two_ranks], references, name, homes)


@pytest.mark.parametrize("homes", ["full", "empty"])
@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_four_ranks(four_ranks: Any, references: dict[str, Any], name: str, homes: str) -> None:
    assert_ranks_equal([result[name, homes] for result in four_ranks], references, name, homes)


def assert_ranks_equal(results: list[Any], references: dict[str, Any], name: str, homes: str) -> None:
    found = merged(results)
    assert set(found["outputs"]) == set(ALL)
    assert homes == "empty" or all(set(found["inputs"][i]) == set(CASES[name].needs_grad) for i in ALL)
    assert_equal(found, references[name])


@pytest.mark.parametrize("homes", rank_jobs.BATCHED)
@pytest.mark.parametrize("name", MAIN_CASES.values())
def test_batches_on_two_ranks(two_ranks: Any, name: str, homes: str) -> None:
    """Batched tensors of another size on each rank, and of no sample on one: as diffusers' own batches."""
    case, model = CASES[name], CASES[name].build()
    for rank, ids in enumerate(rank_jobs.BATCHED[homes]):
        found = two_ranks[rank][name, "batched", homes]
        with one_size(*rank_jobs.BATCH_SIZES[rank]):
            shape = case.sample(0)["hidden_states"].shape
            wanted = run_batch(case, model, ids) if ids else None
        if wanted is None:
            assert found["outputs"][""].shape == (0, *shape)
        else:
            assert_equal({**found, "parameters": {}}, {**wanted, "parameters": {}})
    assert_equal(
        {**found, "outputs": {}, "inputs": {}}, {"outputs": {}, "inputs": {}, "parameters": parameter_gradients(model)}
    )


def test_second_attention_without_split_sequences(two_ranks: Any, references: dict[str, Any]) -> None:
    """SD3.5's attention among visual tokens needs no exchange then; the random plans of the other tests split."""
    assert_ranks_equal([result["sd3.5", "unsplit"] for result in two_ranks], references, "sd3.5", "full")
    assert_equal(rank_jobs.unsplit("sd3.5", ALL), references["sd3.5"])


@pytest.mark.parametrize("setting", rank_jobs.SHARDED, ids=lambda s: " ".join(map(str, s)))
def test_fsdp_lora_and_checkpointing(two_ranks: Any, setting: tuple[str, str, bool, bool]) -> None:
    name, _, lora, _ = setting
    model = CASES[name].build()
    if lora:
        rank_jobs.add_lora(model)
    keys = list(model.state_dict())
    wanted = reference(name, model=model)
    found = merged([result[setting] for result in two_ranks])
    assert found["keys"] == keys
    assert_equal(found, wanted)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert set(found["parameters"]) <= trained
    if lora:
        assert trained and all("lora_" in n for n in trained)


@pytest.mark.parametrize("name", ["wan", "hunyuan-video"])
def test_lora_added_after_balance(name: str) -> None:
    """Also to the patch embedding, a convolution; and the model can be unbalanced with it."""
    model, plain = CASES[name].build(), CASES[name].build()
    balance(model, balancer_of(model))
    for each in (model, plain):
        rank_jobs.add_lora(each)
    wanted = reference(name, model=plain)
    assert_equal(balanced(name, ALL, model=model), wanted)
    model.zero_grad()
    assert_equal(reference(name, model=unbalance(model)), wanted)


def test_comparison_notices_faults(references: dict[str, Any]) -> None:
    """Negative controls: what goes wrong when rows, conditioning or gradients are mixed up shows far above 1e-8."""
    wanted = references["flux"]
    good = balanced("flux", ALL)
    scaled = copy.deepcopy(good)
    next(iter(scaled["parameters"].values())).mul_(1 + 1e-6)
    assert errors(scaled, wanted)["parameter gradients"] > TOLERANCE
    swapped = copy.deepcopy(good)
    swapped["inputs"][1], swapped["inputs"][2] = (
        swapped["inputs"][1],
        {key: value.flip(0) for key, value in swapped["inputs"][2].items()},
    )
    assert errors(swapped, wanted)["input gradients"] > TOLERANCE

    model = CASES["flux"].build()
    balance(model, balancer_of(model))
    _, arguments = stacked(CASES["flux"], ALL, needs_grad=False)
    for name in ("timestep", "guidance", "pooled_projections"):
        with keep_float64():
            out = model(**arguments | {name: arguments[name][::-1]}).sample
        assert (out[0] - wanted["outputs"][0]).norm() > 1e-4 * wanted["outputs"][0].norm()
    with keep_float64():
        text = [nn.functional.pad(part, (0, 0, 0, 1)) for part in arguments["encoder_hidden_states"]]
        out = model(**arguments | {"encoder_hidden_states": text, "txt_ids": None}).sample
    assert (out[0] - wanted["outputs"][0]).norm() > 1e-4 * wanted["outputs"][0].norm()


@pytest.mark.parametrize("name", ["qwen-image", "hunyuan-video"])
def test_masked_padding_is_dropped(name: str) -> None:
    """These families mask padding: without it the packed model equals diffusers' padded batch."""
    case, key = CASES[name], "encoder_hidden_states_mask" if name == "qwen-image" else "encoder_attention_mask"
    model = case.build()
    ids = [0, 2]
    samples, length = {i: case.sample(i) for i in ids}, 9
    masks, texts = {}, {}
    for i in ids:
        text = samples[i]["encoder_hidden_states"]
        masks[i] = torch.arange(length) < len(text)
        texts[i] = torch.cat([text, torch.full((length - len(text), text.shape[1]), 3.0, dtype=text.dtype)])
    with keep_float64():
        padded = {}
        for i in ids:
            arguments = samples[i] | {"encoder_hidden_states": texts[i], key: masks[i]}
            batched = {k: [v] if isinstance(v, list) else v[None] for k, v in arguments.items()}
            padded[i] = model(**batched).sample[0]
        balance(model, balancer_of(model))
        _, arguments = stacked(case, ids, needs_grad=False)
        arguments |= {"encoder_hidden_states": [texts[i] for i in ids], key: [masks[i] for i in ids]}
        found = model(**arguments).sample
    for i, out in zip(ids, found, strict=True):
        assert (out - padded[i]).norm() < TOLERANCE * padded[i].norm()


@pytest.mark.parametrize("name", ["flux", "wan", "sd3"])
@pytest.mark.parametrize("keep_padding", [True, False])
def test_keep_padding(name: str, keep_padding: bool) -> None:
    """These families attend to padding, unless it is dropped."""
    case = CASES[name]
    model, ids = case.build(), [0, 2]
    texts, masks, wanted = [], [], []
    for i in ids:
        sample = case.sample(i)
        text = sample["encoder_hidden_states"]
        # Wan's pipelines pad with zeros to 512; the adapter does that by itself.
        length = 512 if name == "wan" else 9
        texts.append(text if name == "wan" and keep_padding else nn.functional.pad(text, (0, 0, 0, length - len(text))))
        masks.append(torch.arange(len(texts[-1])) < len(text))
        seen = nn.functional.pad(text, (0, 0, 0, length - len(text))) if keep_padding else text
        arguments = sample | {"encoder_hidden_states": seen}
        if name == "flux":
            arguments["txt_ids"] = torch.zeros(len(seen), 3)
        with keep_float64():
            batched = {k: v if k in case.shared else v[None] for k, v in arguments.items()}
            wanted.append(model(**batched).sample[0])
    balance(model, balancer_of(model), keep_padding=keep_padding)
    _, arguments = stacked(case, ids, needs_grad=False)
    arguments.pop("txt_ids", None)
    with keep_float64():
        found = model(**arguments | {"encoder_hidden_states": texts, "encoder_attention_mask": masks}).sample
    for out, reference_out in zip(found, wanted, strict=True):
        assert (out - reference_out).norm() < TOLERANCE * reference_out.norm()


def test_unbalance_and_copies() -> None:
    """The model is itself again, and a copy of a balanced model has its own weights."""
    case = CASES["wan"]
    model = case.build()
    keys, wanted = list(model.state_dict()), reference("wan", model=case.build())["outputs"]
    balance(model, balancer_of(model))
    assert list(model.state_dict()) == keys
    ema = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _, arguments = stacked(case, ALL, needs_grad=False)
    with keep_float64(), torch.no_grad():
        found = ema(**arguments, return_dict=False)
    assert len(found) == 2
    assert all((out - wanted[i]).norm() < TOLERANCE * wanted[i].norm() for i, out in zip(ALL, found[0], strict=True))
    unbalance(ema)
    assert "forward" not in vars(ema) and not any("forward" in vars(module) for module in ema.modules())
    again = reference("wan", model=ema)["outputs"]
    assert all(torch.equal(again[i], wanted[i]) for i in ALL)


@pytest.mark.parametrize("name", MAIN_CASES.values())
def test_autocast_is_close_to_diffusers(name: str) -> None:
    """Float32 weights under autocast, as accelerate runs them."""
    case = CASES[name]
    model = case.build().float()
    _, arguments = stacked(case, ALL, needs_grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = []
        for i in ALL:
            sample = {k: v.float() if k in case.needs_grad else v for k, v in case.sample(i).items()}
            batched = {k: v if k in case.shared else [v] if isinstance(v, list) else v[None] for k, v in sample.items()}
            wanted.append(model(**batched).sample[0].detach())
        balance(model, balancer_of(model))
        output = model(**arguments)
    output.rows.float().square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    for out, reference_out in zip(output.sample, wanted, strict=True):
        assert (out - reference_out).float().norm() < 0.05 * reference_out.float().norm()


@pytest.mark.parametrize("name", MAIN_CASES.values())
def test_mixed_precision_of_fsdp(two_ranks: Any, name: str) -> None:
    """FSDP2 computes in bfloat16; one rank loads nothing."""
    assert_close(merged([result[name, "bfloat16"] for result in two_ranks])["outputs"], outputs_in_bfloat16(name))


@pytest.mark.parametrize("name", MAIN_CASES.values())
def test_bfloat16_is_close_to_diffusers(name: str) -> None:
    """In half precision the two differ by rounding only."""
    model = balance(CASES[name].build().to(torch.bfloat16), balancer_of(CASES[name].build()))
    with torch.no_grad():
        found = model(**stacked(CASES[name], ALL, needs_grad=False)[1]).sample
    assert_close(dict(enumerate(found)), outputs_in_bfloat16(name))


def outputs_in_bfloat16(name: str) -> dict[int, torch.Tensor]:
    """diffusers' own forward in bfloat16; times stay as they are."""
    case, outputs = CASES[name], {}
    model = case.build().to(torch.bfloat16)
    for i in ALL:
        sample = {k: v.bfloat16() if k in case.needs_grad else v for k, v in case.sample(i).items()}
        batched = {k: v if k in case.shared else [v] if isinstance(v, list) else v[None] for k, v in sample.items()}
        with torch.no_grad():
            outputs[i] = model(**batched).sample[0]
    return outputs


def assert_close(found: dict[int, torch.Tensor], wanted: dict[int, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for i, out in found.items():
        assert out.dtype == torch.bfloat16
        assert (out - wanted[i]).float().norm() < 0.05 * wanted[i].float().norm()
