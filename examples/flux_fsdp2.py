"""Full fine-tuning of FLUX.1 with FSDP2 on images of mixed sizes, balanced: float32 shards, computed in bfloat16.

torchrun --nproc-per-node 2 examples/flux_fsdp2.py     # a tiny model with random weights, on CPUs or GPUs
torchrun --nproc-per-node 8 examples/flux_fsdp2.py --pretrained black-forest-labs/FLUX.1-dev --steps 1000
"""

import os

import torch
import torch.distributed as dist
import typer
from diffusers import FluxTransformer2DModel as Flux
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from knapformer import Balancer, Machine
from knapformer.adapters import balance, cost_of, prepare

TINY = dict(in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4)
TINY |= dict(joint_attention_dim=32, pooled_projection_dim=8, guidance_embeds=True, axes_dims_rope=(4, 6, 6))


def load(config, rank: int, device: str) -> tuple[list[torch.Tensor], dict]:
    """This rank's batch: a large image on rank 0, small ones elsewhere. Replace it with latents and prompts."""
    generator = torch.Generator().manual_seed(rank)
    sides = [(24, 32)] if rank == 0 else [(8, 8), (12, 8), (8, 10)]
    ids = [torch.cartesian_prod(torch.zeros(1).long(), torch.arange(h), torch.arange(w)) for h, w in sides]
    clean = [torch.randn(len(x), config.in_channels, generator=generator).to(device) for x in ids]
    text = torch.randn(len(ids), 16, config.joint_attention_dim, generator=generator)
    pooled = torch.randn(len(ids), config.pooled_projection_dim, generator=generator)
    return clean, dict(encoder_hidden_states=text, pooled_projections=pooled, img_ids=ids, guidance=[3.5] * len(ids))


def build(pretrained: str | None, device: str) -> Flux:
    """Sharded on meta; then rank 0 reads bfloat16 weights into host memory, and each GPU keeps its shards of them."""
    with torch.device("meta"):
        model = Flux.from_config(Flux.load_config(pretrained, subfolder="transformer") if pretrained else TINY)
    model.enable_gradient_checkpointing()
    links = Machine(communication_scale=1.0 if pretrained else 0.0)  # on free links even a tiny model is split
    balance(model, Balancer(cost_of(model, machine=links)), keep_padding=True)  # FLUX.1 attends to padded text
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in [*model.transformer_blocks, *model.single_transformer_blocks, model]:
        fully_shard(part, mp_policy=policy)
    model.to_empty(device=device)
    options = {"subfolder": "transformer", "torch_dtype": torch.bfloat16}
    whole = None if dist.get_rank() else (Flux.from_pretrained(pretrained, **options) if pretrained else Flux(**TINY))
    weights = whole.state_dict() if whole else {}
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


def train(pretrained: str | None = None, steps: int = 10) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = build(pretrained, device)
    torch.manual_seed(1000 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if pretrained else 1e-3)
    for i in range(steps):
        clean, batch = load(model.config, rank, device)
        times, target = torch.rand(len(clean), device=device), [torch.randn_like(x) - x for x in clean]
        noisy = [x + t * v for x, t, v in zip(clean, times, target, strict=True)]
        step = prepare(model, noisy, timestep=times, **batch)
        loss = model(noisy, timestep=times, step=step, **batch).loss(target, reduction="token_mean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            print(f"step {i} loss {loss.item() / size:.4f} sequences split {int(step.plan.is_split.sum())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(typer.run(train) if "RANK" in os.environ else __doc__)
