"""FLUX.1 under DistributedDataParallel on images of mixed sizes, balanced: the shortest program.

torchrun --nproc-per-node 2 examples/flux_ddp.py     # a tiny model with random weights, on CPUs
"""

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from torch.nn.parallel import DistributedDataParallel

from knapformer import Balancer
from knapformer.adapters import balance, cost_of

TINY = dict(in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4)
TINY |= dict(joint_attention_dim=32, pooled_projection_dim=8, axes_dims_rope=(4, 6, 6))

dist.init_process_group("gloo")
torch.manual_seed(0)
transformer = FluxTransformer2DModel(**TINY)
balance(transformer, Balancer(cost_of(transformer)))
model = DistributedDataParallel(transformer)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# A large image on rank 0, small ones elsewhere. Replace them with latents and prompts.
sides = [(24, 32)] if dist.get_rank() == 0 else [(8, 8), (12, 8), (8, 10)]
torch.manual_seed(1 + dist.get_rank())
ids = [torch.cartesian_prod(torch.zeros(1).long(), torch.arange(h), torch.arange(w)) for h, w in sides]
clean, text, pooled = [torch.randn(len(x), 16) for x in ids], torch.randn(len(ids), 16, 32), torch.randn(len(ids), 8)
for i in range(20):
    times, target = torch.rand(len(ids)), [torch.randn_like(x) - x for x in clean]
    noisy = [x + t * v for x, t, v in zip(clean, times, target, strict=True)]
    output = model(noisy, text, pooled, times, ids)
    loss = output.loss(target, reduction="token_mean")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach_())
    if dist.get_rank() == 0:
        print(f"step {i} loss {loss.item() / dist.get_world_size():.4f}")
del model  # before the group: on gloo, the end of DDP waits for threads that may wait for it
dist.destroy_process_group()
