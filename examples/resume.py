"""Training that goes on after a fault: torchrun starts the ranks anew, which load the newest checkpoint.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 3 \
    examples/resume.py checkpoints

Without that variable torch 2.13 gives restarted ranks the old store, with addresses of the ranks that are gone.

The losses are those of a run without the fault, and the ranks may be others than before: data and noise belong to the
samples, and which rank computes what changes no number of a sample.
"""

import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from knapformer import Balancer, CostModel
from knapformer.models import DiT, DiTConfig
from knapformer.training.losses import reduce_loss, squared_error
from knapformer.training.parallel import shard

CONFIG = DiTConfig(in_channels=4, conditioning_channels=8, num_heads=4, head_width=8, rope_axes=(4, 4), num_blocks=2)
SAMPLES = 6
"""Of all ranks in a step."""


def load(generator: torch.Generator, rank: int, size: int) -> list[torch.Tensor]:
    """This rank's samples of a step, drawn for all ranks alike. Replace it with a loader that knows its position."""
    lengths = torch.randint(8, 200, (SAMPLES,), generator=generator)
    seeds = torch.randint(2**31, (SAMPLES,), generator=generator)
    noise = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
    pairs = list(zip(lengths.tolist(), noise, strict=True))[rank::size]
    return [torch.randn(n, CONFIG.in_channels, generator=own, dtype=torch.float64) for n, own in pairs]


def state_of(model, optimizer, scheduler, generator: torch.Generator, step: int) -> dict:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict()}
    return state | {"generator": generator.get_state(), "step": step}


def resume(folder: Path, model, optimizer, scheduler, generator: torch.Generator) -> int:
    """Load the newest checkpoint, on any number of ranks; the step to go on with."""
    saved = sorted(folder.glob("step-*/.metadata"))  # written last: without it a checkpoint is not whole
    if not saved:
        return 0
    state = state_of(model, optimizer, scheduler, generator, 0)
    dcp.load(state, checkpoint_id=saved[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    generator.set_state(state["generator"])
    return state["step"]


def loss_of(model, balancer: Balancer, batch: list[torch.Tensor], size: int) -> torch.Tensor:
    x = torch.cat([torch.empty(0, CONFIG.in_channels, dtype=torch.float64), *batch])
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(len(own)) for own in batch)])
    lengths = [len(own) for own in batch]
    step = balancer.prepare(lengths)
    rows, c = step.route(x, lengths=lengths), step.route_conditioning(x.new_ones(len(batch), 8))
    positions = step.route(torch.stack([ids // 8, ids % 8], dim=1))
    y = step.restore(model(rows, positions, c, step.row_index, attention=step.attention))
    errors = squared_error(y, x.sin())
    return reduce_loss(errors, reduction="sample_mean", lengths=lengths, num_samples=SAMPLES, world_size=size)


def fail(kill: bool) -> None:
    """What may happen to a rank."""
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("a fault")


def train(folder: Path, steps: int = 8, save_every: int = 2, fail_at: int = -1, kill: bool = False) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=5))
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DiT(CONFIG).double()
    model.reset_parameters(init_std=0.2)
    model = shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    generator = torch.Generator().manual_seed(1)  # of lengths and noise: its state is the position in the data
    first = resume(folder, model, optimizer, scheduler, generator)
    balancer = Balancer(CostModel(hidden=32, num_heads=4), planner="ulysses")  # it has no state to save
    with balancer.guard():
        for i in range(first, steps):
            batch = load(generator, rank, size)
            if i == fail_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == size - 1:
                fail(kill)
            loss = loss_of(model, balancer, batch, size)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            dist.all_reduce(loss.detach_())
            if rank == 0:
                print(f"step {i} loss {loss.item() / size:.17g} ranks {size}", flush=True)
            if (i + 1) % save_every == 0:
                state = state_of(model, optimizer, scheduler, generator, i + 1)
                dcp.save(state, checkpoint_id=folder / f"step-{i + 1:06d}")
    dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(typer.run(train) if "RANK" in os.environ else __doc__)
