"""A transformer inside what trainers put around it: the gradients of diffusers' own, and its own run in between."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("peft")

import peft
import rank_jobs
import wrapper_jobs
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from family_cases import ALL, CASES, TOLERANCE, balancer_of, errors, merged, reference, stacked
from launch import run_ranks
from torch import nn

from knapformer.adapters import balance, cost_of, prepare, unbalance, unbalanced
from knapformer.errors import ConfigurationError

PRELOAD = ["peft", "torch.distributed.fsdp", "accelerate", "knapformer.adapters.flux", "knapformer.adapters.wan"]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(wrapper_jobs.all_wrappers, 2, timeout_s=200, preload=PRELOAD)


@pytest.mark.parametrize("name", wrapper_jobs.JOBS)
def test_gradients_inside_a_wrapper(ranks: list[Any], name: str) -> None:
    """Of two ranks of which one has no sample, averaged as the wrapper does, against one process with all data."""
    job = wrapper_jobs.JOBS[name]
    model = CASES[job.case].build()
    if job.has_lora:
        rank_jobs.add_lora(model)
    wanted = reference(job.case, model=model)
    found = merged([result[name] for result in ranks])
    assert set(found["outputs"]) == set(ALL)
    worst = errors({**found, "inputs": {}}, wanted)
    assert max(worst.values()) < TOLERANCE, worst
    again = errors(
        {**found, "parameters": merged([result[name]["again"] for result in ranks])["parameters"], "inputs": {}}, wanted
    )
    assert max(again.values()) < TOLERANCE, "after validation with unbalanced() on one rank"


@pytest.mark.parametrize("name", wrapper_jobs.JOBS)
def test_unbalanced_is_diffusers_own_on_one_rank(ranks: list[Any], name: str) -> None:
    for result in ranks:
        for found, wanted in result[name]["own"]:
            assert torch.equal(found, wanted)
    assert sum(len(result[name]["own"]) for result in ranks) >= 1


def test_comparison_notices_another_weight(ranks: list[Any]) -> None:
    """Negative control: gradients of an average of ranks where their sum was meant."""
    found = merged([result["ddp"] for result in ranks])
    halved = {**found, "inputs": {}, "parameters": {name: x / 2 for name, x in found["parameters"].items()}}
    assert errors(halved, reference("flux"))["parameter gradients"] > 0.1


@pytest.mark.parametrize(("name", "reduction", "homes"), wrapper_jobs.LOSSES)
def test_loss_of_an_output_is_that_of_one_process(ranks: list[Any], name: str, reduction: str, homes: str) -> None:
    """Gradients as wrappers average them; a rank without samples logs 0. Another mean is another loss."""
    means = {mean: wrapper_jobs.mean_loss(name, mean) for mean in ("token_mean", "sample_mean")}
    found, _ = ranks[0]["losses"][name, reduction, homes]

    def error(wanted: dict[str, torch.Tensor]) -> float:
        return errors({"outputs": {}, "inputs": {}, "parameters": found}, {"outputs": {}, "parameters": wanted})[
            "parameter gradients"
        ]

    assert error(means.pop(reduction)) < TOLERANCE
    assert error(*means.values()) > 1e-3
    values = [result["losses"][name, reduction, homes][1] for result in ranks]
    assert (values[1] == 0) == (homes == "none") and values[0] > 0


def flux_pair() -> tuple[Any, Any, Any, dict[str, Any]]:
    """A model, as balanced; another with the same weights; a balancer; arguments."""
    model, plain = CASES["flux"].build().float(), CASES["flux"].build().float()
    return model, plain, balancer_of(model), stacked(CASES["flux"], ALL, needs_grad=False)[1]


def pictures(transformer: Any) -> torch.Tensor:
    """Sampled with guidance by diffusers' own pipeline, batched prompts."""
    pipeline = FluxPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, transformer)
    pipeline.set_progress_bar_config(disable=True)
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(5))
    return pipeline(
        prompt_embeds=draw(2, 4, 10), pooled_prompt_embeds=draw(2, 6), negative_prompt_embeds=draw(2, 4, 10),
        negative_pooled_prompt_embeds=draw(2, 6), true_cfg_scale=2.0, latents=draw(2, 16, 4), height=64, width=64,
        num_inference_steps=2, output_type="latent",
    ).images  # fmt: skip


def test_a_pipeline_in_the_middle_of_training() -> None:
    """Under accelerate's bf16 wrapper too, which holds on to the forward that ``balance`` placed."""
    accelerate = pytest.importorskip("accelerate")
    model, plain, balancer, arguments = flux_pair()
    balance(model, balancer)
    prepared, plain_prepared = (
        accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(each) for each in (model, plain)
    )

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        prepared(**arguments).rows.square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    before = gradients()
    with unbalanced(prepared) as transformer:
        assert transformer is model
        assert torch.equal(pictures(transformer), pictures(plain_prepared))
        with pytest.raises(ConfigurationError, match="is not balanced"):
            prepare(prepared, **arguments)
    after = gradients()
    assert len(before) > 50 and all(torch.equal(before[name], after[name]) for name in before)


def test_unbalanced_puts_back_after_an_error() -> None:
    model, _, balancer, arguments = flux_pair()
    balance(model, balancer)
    wanted = model(**arguments).rows
    with pytest.raises(RuntimeError, match="sampling failed"), unbalanced(model):
        raise RuntimeError("sampling failed")
    assert torch.equal(model(**arguments).rows, wanted)
    with unbalanced(model):
        rank_jobs.add_lora(model)  # layers that come inside are balanced afterwards
    assert "forward" in vars(model.transformer_blocks[0].attn)
    model(**arguments)


def test_accelerate_in_both_orders() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, plain, balancer, arguments = flux_pair()
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    with pytest.raises(
        ConfigurationError, match=r"accelerate has wrapped .* before accelerator\.prepare\(transformer\)"
    ):
        balance(prepared, balancer)
    model, _, _, _ = flux_pair()
    prepared = accelerator.prepare(balance(model, balancer))
    with torch.autocast("cpu", torch.bfloat16):
        wanted = balance(plain, balancer)(**arguments).sample
    assert all(torch.equal(a, b.float()) for a, b in zip(prepared(**arguments).sample, wanted, strict=True))
    # unbalanced and balanced again, while accelerate's wrapper stays around it
    unbalance(accelerator.unwrap_model(prepared))
    sample = {name: value[0] if "ids" in name else value[0][None].float() for name, value in arguments.items()}
    own = accelerator.prepare(CASES["flux"].build().float())
    assert torch.equal(prepared(**sample).sample, own(**sample).sample)
    with pytest.raises(ConfigurationError, match="is not balanced"):
        unbalance(prepared)
    balance(prepared, balancer)
    assert all(torch.equal(a, b.float()) for a, b in zip(prepared(**arguments).sample, wanted, strict=True))


class Peft(nn.Module):
    """A module that trainers hold their model in; not looked into."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


def test_wrappers_are_looked_into() -> None:
    model, _, balancer, arguments = flux_pair()
    config = peft.LoraConfig(r=2, target_modules=["to_q"])
    for wrap in (lambda m: peft.get_peft_model(m, config), functools.partial(torch.compile, backend="eager")):
        inner = CASES["flux"].build().float()
        wrapped = wrap(inner)
        assert cost_of(wrapped) == cost_of(inner)
        assert balance(wrapped, balancer) is wrapped
        step = prepare(wrapped, **arguments)
        rows = inner(**arguments, step=step).rows
        assert len(rows) == step.lengths.num_tokens - sum(map(len, arguments["encoder_hidden_states"]))
        assert unbalance(wrapped) is wrapped and "forward" not in vars(inner)
    with pytest.raises(ConfigurationError, match="no adapter for Peft; there is one for FluxTransformer2DModel"):
        balance(Peft(model), balancer)
