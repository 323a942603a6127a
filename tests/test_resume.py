"""examples/resume.py: after a fault training goes on from the checkpoint with the losses of a run without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STEP = re.compile(r"step (\d+) loss (\S+) ranks \d+")


def run(folder: Path, num_ranks: int, *options: str, max_restarts: int = 0) -> tuple[list[tuple[int, float]], str]:
    """Step and loss as they were printed, and the whole output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += [f"--max-restarts={max_restarts}", "examples/resume.py", str(folder), "--steps", "5", *options]
    ours = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ours["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | ours, capture_output=True, text=True, timeout=200, check=False
    )
    return [(int(i), float(loss)) for i, loss in STEP.findall(done.stdout)], done.stdout + done.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run without a fault, on two ranks."""
    steps, output = run(tmp_path_factory.mktemp("whole"), 2, "--save-every", "9")
    assert [i for i, _ in steps] == [*range(5)] and len(set(steps)) == 5, output
    return [loss for _, loss in steps]


def test_torchrun_restarts_the_ranks_when_one_is_killed(whole: list[float], tmp_path: Path) -> None:
    steps, output = run(tmp_path / "killed", 2, "--fail-at", "3", "--kill", max_restarts=1)
    assert [i for i, _ in steps] == [0, 1, 2, 2, 3, 4], output
    assert [loss for _, loss in steps] == [*whole[:3], *whole[2:]], "from the checkpoint after two steps, bitwise"
    assert "SIGKILL" in output or "exitcode: -9" in output


def test_training_goes_on_after_a_fault_on_the_same_and_on_other_ranks(whole: list[float], tmp_path: Path) -> None:
    broken, output = run(tmp_path / "broken", 2, "--fail-at", "3")
    assert broken == list(enumerate(whole[:3])) and "a fault" in output
    others = [run(tmp_path / "broken", num_ranks, "--save-every", "9")[0] for num_ranks in (3, 1)]
    same, _ = run(tmp_path / "broken", 2, "--save-every", "9")
    assert same == [(i, whole[i]) for i in (2, 3, 4)], "from the checkpoint after two steps, bitwise"
    for other in others:
        assert [i for i, _ in other] == [2, 3, 4] and all(abs(loss - whole[i]) < 1e-12 * whole[i] for i, loss in other)
