"""LoRA for Wan 2.1 with peft and FSDP2 on images and videos, balanced.

torchrun --nproc-per-node 2 examples/wan_lora.py     # a tiny model with random weights, on CPUs or GPUs
torchrun --nproc-per-node 8 examples/wan_lora.py --pretrained Wan-AI/Wan2.1-T2V-1.3B-Diffusers --steps 1000
"""

import os

import torch
import torch.distributed as dist
import typer
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map

from knapformer import Balancer, Machine
from knapformer.adapters import balance, cost_of, prepare
from knapformer.losses import reduce_loss, squared_error

TINY = dict(num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=32, ffn_dim=96)


def load(config, rank: int, device: str) -> tuple[list[torch.Tensor], dict]:
    """This rank's batch: a video on rank 0, images elsewhere. Replace it with latents and prompts."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(9, 16, 16)] if rank == 0 else [(1, 16, 16), (1, 8, 12)]
    clean = [torch.randn(config.in_channels, *shape, generator=generator) for shape in shapes]
    batch = {
        "encoder_hidden_states": [torch.randn(7 + h, config.text_dim, generator=generator) for _, h, _ in shapes],
    }
    return tree_map(lambda x: x.to(device), (clean, batch))


def train(pretrained: str | None = None, steps: int = 10) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    load_model = WanTransformer3DModel.from_pretrained
    model = (
        load_model(pretrained, subfolder="transformer") if pretrained else WanTransformer3DModel(**TINY, num_layers=2)
    )
    model.to(device).requires_grad_(False).enable_gradient_checkpointing()
    model.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    # Only on free links is so tiny a model worth splitting. Wan's pretrained weights attend to padded text.
    cost = cost_of(model, machine=Machine(communication_scale=1.0 if pretrained else 0.0))
    balance(model, Balancer(cost), keep_padding=pretrained is not None)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4 if pretrained else 1e-2)
    generator = torch.Generator(device).manual_seed(1000 + rank)
    for i in range(steps):
        clean, batch = load(model.config, rank, device)
        noise = [torch.randn(x.shape, generator=generator, device=device) for x in clean]
        times = torch.rand(len(clean), generator=generator, device=device)
        noisy = [torch.lerp(x, e, t) for x, e, t in zip(clean, noise, times, strict=True)]
        step = prepare(model, noisy, 1000 * times, **batch)
        output = model(noisy, 1000 * times, **batch, step=step)
        pairs = zip(output.sample, clean, noise, strict=True)
        flat = [squared_error(y.reshape(-1, 1), (e - x).reshape(-1, 1)) for y, x, e in pairs]
        errors = torch.cat([output.rows[:0].flatten(), *flat])  # has a graph without samples, too
        num_elements = step.lengths.num_tokens * output.rows.shape[1]  # of all ranks
        loss = reduce_loss(errors, reduction="token_mean", num_tokens=num_elements, world_size=size)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            print(f"step {i} loss {loss.item() / size:.4f} sequences split {int(step.plan.is_split.sum())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(typer.run(train) if "RANK" in os.environ else __doc__)
