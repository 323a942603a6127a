"""A LoRA for FLUX.1 under accelerate, as diffusers' scripts train one, on images of mixed sizes, balanced.

accelerate launch --multi_gpu --num_processes 2 examples/flux_lora_accelerate.py     # a tiny model, on CPUs or GPUs
accelerate launch --multi_gpu --num_processes 8 examples/flux_lora_accelerate.py \\
    --pretrained black-forest-labs/FLUX.1-dev --epochs 100
"""

from pathlib import Path

import torch
import typer
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import FluxTransformer2DModel as Flux
from diffusers.training_utils import cast_training_params
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from knapformer import Balancer
from knapformer.adapters import balance, cost_of

TINY = dict(in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4)
TINY |= dict(joint_attention_dim=32, pooled_projection_dim=8, guidance_embeds=True, axes_dims_rope=(4, 6, 6))
SIDES = [(24, 32), (8, 8), (12, 8), (8, 10), (16, 16), (8, 8), (20, 8), (8, 12)]
LORA = dict(r=16, lora_alpha=16, target_modules=["attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0"])


def sample(config, i: int) -> tuple[torch.Tensor, ...]:
    """Of one data set for all ranks. Replace it with latents and prompts, text padded as in pretraining."""
    random, (h, w) = torch.Generator().manual_seed(i), SIDES[i]
    sizes = [(h * w, config.in_channels), (16, config.joint_attention_dim), (config.pooled_projection_dim,)]
    ids = torch.cartesian_prod(torch.zeros(1).long(), torch.arange(h), torch.arange(w))
    return *(torch.randn(size, generator=random) for size in sizes), ids


def loss_of(model, batch: list[tuple]) -> torch.Tensor:
    """Of this rank's samples. Any number of them, of any sizes: nothing is padded or cropped to a common size."""
    clean, text, pooled, ids = map(list, zip(*batch, strict=True))
    target = [torch.randn_like(x) - x for x in clean]
    times = torch.rand(len(clean), device=clean[0].device)
    noisy = [x + t * v for x, t, v in zip(clean, times, target, strict=True)]
    return model(noisy, text, pooled, times, ids, guidance=[3.5] * len(ids)).loss(target, reduction="token_mean")


def train(pretrained: str | None = None, epochs: int = 10, folder: Path = Path("lora"), resume: bool = False) -> None:
    has_gpu = torch.cuda.is_available()
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=not has_gpu)
    set_seed(0)
    read = {"subfolder": "transformer", "torch_dtype": torch.bfloat16}
    model = Flux.from_pretrained(pretrained, **read) if pretrained else Flux(**TINY).to(torch.bfloat16)
    model.requires_grad_(False).to(accelerator.device).enable_gradient_checkpointing()
    model.add_adapter(LoraConfig(init_lora_weights="gaussian", **LORA))
    cast_training_params(model, dtype=torch.float32)
    balance(model, Balancer(cost_of(model)), keep_padding=True)  # before prepare, which wraps the model's forward
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4 if pretrained else 1e-2)
    loader = DataLoader(range(len(SIDES)), 2, True, collate_fn=lambda ids: [sample(model.config, i) for i in ids])
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    set_seed(1, device_specific=True)  # noise and times are each rank's own

    def save_lora(_models: list, weights: list, path: str) -> None:
        weights.clear()  # the whole transformer's
        if accelerator.is_main_process:
            model.save_lora_adapter(path)

    def load_lora(models: list, path: str) -> None:
        models.clear()
        set_peft_model_state_dict(model, load_file(f"{path}/pytorch_lora_weights.safetensors"))

    accelerator.register_save_state_pre_hook(save_lora)
    accelerator.register_load_state_pre_hook(load_lora)
    if resume:
        accelerator.load_state(folder)
    for epoch in range(epochs):
        for batch in loader:
            with accelerator.accumulate(wrapped):
                loss = loss_of(wrapped, batch)
                accelerator.backward(loss)  # divides by the accumulation's steps: a mean over micro-batches
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    accelerator.save_state(folder)
    accelerator.free_memory(wrapped)  # DDP ends before its group: see docs/hangs.md
    accelerator.end_training()


if __name__ == "__main__":
    typer.run(train)
