"""Run the FLUX.1 example under Ray Train: one worker per GPU, or two CPU workers where there is none.

python examples/launch/ray_train.py --workers 8 --pretrained black-forest-labs/FLUX.1-dev
"""

import sys
from pathlib import Path

import ray
import torch
import typer
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

EXAMPLES = str(Path(__file__).parents[1])


def train_on_worker(settings: dict) -> None:
    """Ray has set RANK, WORLD_SIZE and LOCAL_RANK, and made the default process group."""
    sys.path.insert(0, EXAMPLES)
    from flux_fsdp2 import train

    train(**settings)


def main(workers: int = 2, pretrained: str | None = None, steps: int = 10) -> None:
    use_gpu = torch.cuda.is_available()
    ray.init(runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"pretrained": pretrained, "steps": steps},
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
    )
    trainer.fit()


if __name__ == "__main__":
    typer.run(main)
