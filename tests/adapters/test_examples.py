"""The examples run under torchrun, on one node and on two agents over loopback, and learn."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"step (\d+) loss ([\d.]+) sequences split (\d+)")
TIMEOUT_S = 150


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(*agents: subprocess.Popen[str]) -> list[tuple[int, float, int]]:
    """(step, loss, split sequences) as printed by the first agent."""
    try:
        outputs = [agent.communicate(timeout=TIMEOUT_S)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert all(agent.returncode == 0 for agent in agents), "\n".join(outputs)
    return [(int(i), float(loss), int(split)) for i, loss, split in STEP.findall(outputs[0])]


@pytest.mark.parametrize("name", ["flux_fsdp2", "wan_lora"])
def test_example(name: str) -> None:
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 80
    steps = finish(torchrun("--standalone", "--nproc-per-node", "2", str(path), "--steps", "20"))
    losses = [loss for _, loss, _ in steps]
    assert [i for i, _, _ in steps] == list(range(20))
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])
    assert all(split > 0 for _, _, split in steps)


def test_two_nodes() -> None:
    """One agent per node, as on a cluster; both are this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rendezvous = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    script = [str(ROOT / "examples/wan_lora.py"), "--steps", "3"]
    agents = [torchrun(*rendezvous, "--node-rank", str(node), *script) for node in (0, 1)]
    steps = finish(*agents)
    assert [i for i, _, _ in steps] == [0, 1, 2] and all(split > 0 for _, _, split in steps)
