"""How often balanced models with compiled blocks are compiled, and how fast they are: JSON.

python scripts/compiled.py            # counts and errors; 10 minutes
python scripts/compiled.py --write    # also to benchmarks/DATE-compiled.json, and the table of docs/compile.md
python scripts/compiled.py --speed    # compiled against uncompiled steps, by inductor; 5 minutes, a C++ compiler

Counts are of graphs that two gloo ranks compile with ``backend="aot_eager"``, ``fullgraph=True`` and ``dynamic=True``
over steps of changing lengths, which leave a rank without rows in some and with one row in others. Speed is the ratio
of the medians of steps taken in turn, uncompiled and compiled, of the slower of two ranks.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/compile.md"
sys.path.insert(0, str(ROOT / "tests/support"))
BEGIN, END = "<!-- made by scripts/compiled.py -->\n", "<!-- end of the table -->\n"
FAMILIES = ("flux", "wan", "qwen-image", "sd3", "sd3.5", "hunyuan-video")
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "mmdit": {"": {}, "checkpointing": {"checkpoint": "block"}, "two lanes": {"lanes": 2}},
    "dit": {"": {}, "checkpointing, FSDP2, two lanes": {"checkpoint": "block", "fsdp": True, "lanes": 2}},
}
FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "checkpointing": {"checkpoint": True},
    "checkpointing, FSDP2": {"checkpoint": True, "fsdp": True},
    "two lanes": {"lanes": 2},
}


def own_models() -> list[dict[str, Any]]:
    from balanced_cases import Case
    from compile_cases import compare_compiled
    from launch import run_ranks

    rows = []
    for model, options in OPTIONS.items():
        for name, values in options.items():
            found = run_ranks(compare_compiled, 2, [Case(model, seed=100, **values)], timeout_s=600)
            rows.append(row(model, name, [ranks[0] for ranks in found]))
    return rows


def families() -> list[dict[str, Any]]:
    from compile_cases import compare_families
    from launch import run_ranks

    rows = []
    for name, values in FAMILY_OPTIONS.items():
        chosen = [f for f in FAMILIES if "fsdp" not in values or not f.startswith("sd3")]
        for family in chosen:
            found = run_ranks(partial(compare_families, **values), 2, [family], timeout_s=900)
            rows.append(row(family, name, [ranks[family] for ranks in found]))
    return rows


def row(model: str, options: str, ranks: list[Any]) -> dict[str, Any]:
    from compile_cases import WARM_UP

    most = max(ranks, key=lambda found: found.graphs[-1])
    return {
        "model": model,
        "options": options,
        "steps": len(most.graphs),
        "graphs_first_step": max(found.graphs[0] for found in ranks),
        f"graphs_step_{WARM_UP}": max(found.graphs[WARM_UP - 1] for found in ranks),
        "graphs": most.graphs[-1],
        "breaks": sum(found.breaks for found in ranks),
        "worst_error": max(max(found.errors) for found in ranks),
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "| model | with | graphs after the first step | after all | breaks | worst error |\n|---|---|---|---|---|---|\n"
    )
    return head + "".join(
        f"| {r['model']} | {r['options'] or '–'} | {r['graphs_first_step']} | {r['graphs']} | {r['breaks']} "
        f"| {r['worst_error']:.1e} |\n"
        for r in rows
    )


def speed_job(rank: int, world_size: int, dtype_name: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of steps of an MMDiT, uncompiled and compiled in turn, and of the first compiled steps."""
    import copy

    import torch
    import torch.distributed as dist

    from knapformer import Balancer, CostModel
    from knapformer.models.config import MMDiTConfig
    from knapformer.models.mmdit import MMDiT

    torch.manual_seed(0)
    dtype = getattr(torch, dtype_name)
    shape = {"in_channels": 16, "text_channels": 32, "conditioning_channels": 32, "num_heads": 12, "head_width": 32}
    config = MMDiTConfig(**shape, rope_axes=(8, 12, 12), num_double_blocks=2, num_single_blocks=2)
    plain = MMDiT(config).to(dtype)
    plain.reset_parameters()
    compiled = copy.deepcopy(plain)
    for block in compiled.blocks:
        block.compile(fullgraph=True, dynamic=True)
    balancer = Balancer(CostModel(hidden=384, num_heads=12))
    lengths = [([512, 1024], [256]), ([900], [300, 200]), ([700, 300], [])]

    def step(model: Any, number: int) -> float:
        visual = list(lengths[number % len(lengths)][rank])
        text = [16] * len(visual)
        dist.barrier()
        begin = time.perf_counter()
        run(model, balancer, config, text, visual, dtype)
        dist.barrier()
        return time.perf_counter() - begin

    first = [step(compiled, i) for i in range(len(lengths))]
    [step(plain, i) for i in range(len(lengths))]
    pairs = [(step(plain, i), step(compiled, i)) for i in range(rounds * len(lengths))]
    uncompiled, with_compiler = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {"dtype": dtype_name, "first_steps_s": sum(first), "ratio": uncompiled / with_compiler, "pairs_s": pairs}


def run(model: Any, balancer: Any, config: Any, text: list[int], visual: list[int], dtype: Any) -> None:
    """Forward and backward of one balanced step."""
    import torch

    step = balancer.prepare({"text": text, "visual": visual})
    x = step.route(torch.randn(sum(visual), config.in_channels, dtype=dtype), stream="visual")
    t = step.route(torch.randn(sum(text), config.text_channels, dtype=dtype), stream="text")
    positions = step.route(torch.zeros(sum(text) + sum(visual), len(config.rope_axes), dtype=torch.int64))
    c = step.route_conditioning(torch.randn(len(visual), config.conditioning_channels, dtype=dtype))
    y = model(x, t, positions, c, step.sequence_index, step.streams, attention=step.attention)
    step.restore(y, stream="visual").float().square().sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


def main() -> None:
    speed = "--speed" in sys.argv[1:]
    found: dict[str, Any] = {
        "schema": "knapformer.compiled/1",
        "command": "python " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()} CPU, gloo, 2 ranks",
        "versions": {name: version(name) for name in ("torch", "diffusers")},
    }
    if speed:
        from launch import run_ranks

        found["speed"] = [run_ranks(speed_job, 2, dtype, 8, timeout_s=900)[0] for dtype in ("float32", "bfloat16")]
    else:
        found["rows"] = [*own_models(), *families()]
    print(json.dumps(found, indent=1))
    if "--write" in sys.argv[1:]:
        kind = "compiled-speed" if speed else "compiled"
        (ROOT / f"benchmarks/{found['date']}-{kind}.json").write_text(json.dumps(found, indent=1) + "\n")
        if not speed:
            text = PAGE.read_text()
            before, after = text[: text.index(BEGIN)], text[text.index(END) :]
            PAGE.write_text(before + BEGIN + "\n" + table(found["rows"]) + "\n" + after)


if __name__ == "__main__":
    main()
