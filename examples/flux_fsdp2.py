"""Full fine-tuning of FLUX.1 with FSDP2 on images of mixed resolutions, balanced.

torchrun --nproc-per-node 2 examples/flux_fsdp2.py     # a tiny model with random weights, on CPUs or GPUs
torchrun --nproc-per-node 8 examples/flux_fsdp2.py --pretrained black-forest-labs/FLUX.1-dev --steps 1000
"""

import os

import torch
import torch.distributed as dist
import typer
from diffusers import FluxTransformer2DModel
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map

from knapformer import Balancer, Machine
from knapformer.adapters import balance, cost_of, prepare
from knapformer.losses import reduce_loss, squared_error

TINY = dict(
    in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
    joint_attention_dim=32, pooled_projection_dim=8, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
)  # fmt: skip


def load(config, rank: int, device: str) -> tuple[list[torch.Tensor], dict]:
    """This rank's batch: a large image on rank 0, small ones elsewhere. Replace it with latents and prompts."""
    generator = torch.Generator().manual_seed(rank)
    sides = [(24, 32)] if rank == 0 else [(8, 8), (12, 8), (8, 10)]
    ids = [torch.cartesian_prod(torch.zeros(1).long(), torch.arange(h), torch.arange(w)) for h, w in sides]
    clean = [torch.randn(len(x), config.in_channels, generator=generator) for x in ids]
    batch = {
        "encoder_hidden_states": [torch.randn(h, config.joint_attention_dim, generator=generator) for h, _ in sides],
        "pooled_projections": torch.randn(len(sides), config.pooled_projection_dim, generator=generator),
        "img_ids": ids,
        "guidance": torch.full((len(sides),), 3.5),
    }
    return tree_map(lambda x: x.to(device), (clean, batch))


def train(pretrained: str | None = None, steps: int = 10) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    Flux = FluxTransformer2DModel
    model = Flux.from_pretrained(pretrained, subfolder="transformer") if pretrained else Flux(**TINY)
    model.to(device).enable_gradient_checkpointing()
    # Only on free links is so tiny a model worth splitting.
    balance(model, Balancer(cost_of(model, machine=Machine(communication_scale=1.0 if pretrained else 0.0))))
    for block in [*model.transformer_blocks, *model.single_transformer_blocks]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if pretrained else 1e-3)
    generator = torch.Generator(device).manual_seed(1000 + rank)
    for i in range(steps):
        clean, batch = load(model.config, rank, device)
        noise = [torch.randn(x.shape, generator=generator, device=device) for x in clean]
        times = torch.rand(len(clean), generator=generator, device=device)
        noisy = [torch.lerp(x, e, t) for x, e, t in zip(clean, noise, times, strict=True)]
        step = prepare(model, noisy, timestep=times, **batch)
        rows = model(noisy, timestep=times, step=step, **batch).rows  # .sample is the list of images
        target = torch.cat([rows[:0], *(e - x for x, e in zip(clean, noise, strict=True))])
        num_tokens = int(dict(step.lengths.streams)["visual"].sum())  # of all ranks
        loss = reduce_loss(squared_error(rows, target), reduction="token_mean", num_tokens=num_tokens, world_size=size)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            print(f"step {i} loss {loss.item() / size:.4f} sequences split {int(step.plan.is_split.sum())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(typer.run(train) if "RANK" in os.environ else __doc__)
