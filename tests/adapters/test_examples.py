"""The examples run under their launchers and learn, on one node and on two agents over loopback; so do the recipes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("diffusers")
pytest.importorskip("peft")

import example_jobs
from launch import run_ranks

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"(?:step|epoch) (\d+) loss ([\d.]+)(?: sequences split (\d+))?")
WEIGHTS = "pytorch_lora_weights.safetensors"
TIMEOUT_S = 280


def start(command: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    ours = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | ours | variables
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(*agents: subprocess.Popen[str]) -> list[list[tuple[int, float, int]]]:
    """(step, loss, split sequences) as printed by each agent."""
    try:
        outputs = [agent.communicate(timeout=TIMEOUT_S)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert all(agent.returncode == 0 for agent in agents), "\n".join(outputs)
    return [[(int(i), float(loss), int(split or 0)) for i, loss, split in STEP.findall(output)] for output in outputs]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]


@pytest.mark.parametrize(
    ("name", "launcher", "options", "splits", "num_lines"),
    [
        ("flux_ddp", TORCHRUN, [], False, 45),
        ("flux_fsdp2", TORCHRUN, ["--steps", "20"], True, 80),
        ("wan_lora", TORCHRUN, ["--steps", "20"], True, 80),
        ("flux_lora_accelerate", ACCELERATE, ["--epochs", "20", "--folder", "{folder}"], False, 90),
    ],
)
def test_example(
    name: str, launcher: list[str], options: list[str], splits: bool, num_lines: int, tmp_path: Path
) -> None:
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < num_lines
    options = [option.format(folder=tmp_path) for option in options]
    (steps,) = finish(start([*launcher, str(path), *options], {"MASTER_PORT": free_port()}))
    losses = [loss for _, loss, _ in steps]
    assert [i for i, _, _ in steps] == list(range(20))
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])
    assert all(split > 0 for _, _, split in steps) or not splits
    assert name != "flux_lora_accelerate" or {f"random_states_{r}.pkl" for r in (0, 1)} <= set(os.listdir(tmp_path))


def test_a_lora_goes_on_where_accelerate_saved_it(tmp_path: Path) -> None:
    """What is saved after it was loaded is what was loaded, on both ranks; diffusers loads the LoRA by itself.

    Negative control: the untrained LoRA is another one.
    """
    preload = ["torch.distributed", "accelerate", "peft", "knapformer.adapters.flux"]
    run_ranks(example_jobs.saved_again, 2, str(tmp_path), preload=preload, timeout_s=200)
    lora = example_jobs.example("flux_lora_accelerate")
    trained, again, untrained = (
        lora.load_file(tmp_path / name / WEIGHTS) for name in ("trained", "again", "untrained")
    )
    assert len(trained) == 20
    for name, x in trained.items():
        assert torch.equal(x, again[name])
        assert "lora_B" not in name or not torch.equal(x, untrained[name])
    states = [torch.load(tmp_path / name / "optimizer.bin")["state"] for name in ("trained", "again")]
    assert len(states[0]) == 20
    for i, state in states[0].items():
        assert all(torch.equal(x, states[1][i][key]) for key, x in state.items()) and float(state["step"]) == 2
    model = lora.Flux(**lora.TINY)
    model.load_lora_adapter(tmp_path / "trained", prefix=None, weight_name=WEIGHTS)
    found = dict(model.named_parameters())
    assert all(torch.equal(found[name.replace(".weight", ".default_0.weight")], x) for name, x in trained.items())


def test_pretrained_weights_are_sharded_before_they_are_on_a_device(tmp_path: Path) -> None:
    """The first loss is that of the run without --pretrained, whose weights these are; others give another.

    Memory is that of the rank that only receives: its float32 shards, and a tensor or two of the checkpoint at a time.
    """
    flux = example_jobs.example("flux_fsdp2")
    for seed in (0, 1):
        torch.manual_seed(seed)
        flux.Flux(**flux.TINY).save_pretrained(tmp_path / str(seed) / "transformer")
    same, other = str(tmp_path / "0"), str(tmp_path / "1")
    preload = ["torch.distributed", "knapformer.adapters.flux"]
    sender, receiver = run_ranks(example_jobs.pretrained, 2, [same, None, other], preload=preload)
    losses = [float(STEP.findall(text)[0][1]) for text in sender["losses"]]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    assert abs(losses[2] - losses[1]) > 1e-2
    read = flux.Flux.from_pretrained(same, subfolder="transformer", torch_dtype=torch.bfloat16)
    assert all(torch.equal(x.float(), sender["weights"][name]) for name, x in read.state_dict().items())
    largest, whole = (f(p.numel() for p in read.parameters()) for f in (max, sum))
    assert receiver["dtypes"] == {torch.float32} and receiver["local"] + sender["local"] == whole
    assert 2 * 3 * largest < 2 * whole / 4
    assert receiver["peak"] < 4 * receiver["local"] + 2 * 3 * largest


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_slurm_script_on_two_nodes(tmp_path: Path) -> None:
    """One torchrun agent per node; both are this machine, and Slurm's commands are stand-ins."""
    for name, text in {
        "scontrol": "echo 127.0.0.1; echo other-node",
        "srun": 'for node in 1 0; do SLURM_NODEID=$node "$@" & done; wait -n && wait -n',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "MASTER_PORT": free_port()}
    command = ["bash", str(ROOT / "examples/launch/slurm.sh"), str(ROOT / "examples/wan_lora.py"), "--steps", "3"]
    (steps,) = finish(start(command, slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}))
    assert [i for i, _, _ in steps] == [0, 1, 2] and all(split > 0 for _, _, split in steps)


def test_pytorchjob_on_two_nodes(tmp_path: Path) -> None:
    """The manifest's command with the variables that the training operator sets in each pod."""
    manifest = yaml.safe_load((ROOT / "examples/launch/pytorchjob.yaml").read_text())
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    containers = [replicas[kind]["template"]["spec"]["containers"][0] for kind in ("Master", "Worker")]
    limits = [container["resources"]["limits"]["nvidia.com/gpu"] for container in containers]
    assert limits == [int(manifest["spec"]["nprocPerNode"])] * 2
    script = tmp_path / "plan.py"
    script.write_text(PLAN_A_STEP)
    agents = []
    port = free_port()
    for node, container in enumerate(containers):
        assert container["command"][0] == "torchrun"
        assert (ROOT / "examples" / Path(container["command"][1]).name).exists()
        pet = {"NNODES": "2", "NODE_RANK": str(node), "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1"}
        pet = {f"PET_{name}": value for name, value in (pet | {"MASTER_PORT": port}).items()}
        agents.append(start([sys.executable, "-m", "torch.distributed.run", str(script)], pet))
    assert finish(*agents) == [[(0, 7.0, 2)], []]


PLAN_A_STEP = """
import torch.distributed as dist
from knapformer import Balancer
dist.init_process_group("gloo")
step = Balancer(planner="ulysses").prepare([[3], [4]][dist.get_rank()])
if step.rank == 0:
    print(f"step 0 loss {float(step.lengths.num_tokens)} sequences split {int(step.plan.is_split.sum())}", flush=True)
dist.barrier()  # gloo's threads sometimes abort a rank that leaves while another still talks to it
dist.destroy_process_group()
"""
