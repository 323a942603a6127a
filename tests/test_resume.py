"""examples/resume.py: after a fault training goes on from the checkpoint with the losses of a run without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEP = re.compile(r"step (\d+) loss (\S+) ranks \d+")


def losses(folder: Path, num_ranks: int, *options: str) -> tuple[dict[int, float], str]:
    """Loss of each step that was printed, and the whole output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["examples/resume.py", str(folder), "--steps", "5", *options]
    ours = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | ours, capture_output=True, text=True, timeout=200, check=False
    )
    return {int(i): float(loss) for i, loss in STEP.findall(run.stdout)}, run.stdout + run.stderr


def test_training_goes_on_after_a_fault_on_the_same_and_on_other_ranks(tmp_path: Path) -> None:
    whole, output = losses(tmp_path / "whole", 2, "--save-every", "9")
    assert list(whole) == [*range(5)] and len(set(whole.values())) == 5, output
    broken, output = losses(tmp_path / "broken", 2, "--fail-at", "3")
    assert list(broken) == [0, 1, 2] and "a fault" in output
    (tmp_path / "other").symlink_to(tmp_path / "broken")
    other, _ = losses(tmp_path / "other", 3, "--save-every", "9")
    same, _ = losses(tmp_path / "broken", 2, "--save-every", "9")
    assert same == {i: whole[i] for i in (2, 3, 4)}, "from the checkpoint after two steps, bitwise"
    assert list(other) == list(same) and all(abs(other[i] - whole[i]) < 1e-12 * whole[i] for i in other)
