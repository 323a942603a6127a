"""The commands that predict: simulate and advise. Each reads its options and calls a function."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from knapformer.cli.common import AsJson, Out, parse_cap, parse_names, progress_bar, stamp, write_json
from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths, read_lengths

MODEL, DEVICE, DEVICES = "flux.1-dev", "h100", "a100, a800, a6000, h100, h200 or b200"


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(simulate)
    app.command()(advise)


def simulate(
    preset: Annotated[str | None, typer.Option(help="knapformer, zellige or open-sora.")] = None,
    workload: Annotated[str | None, typer.Option(help="A workload's name or data codes; or a lengths file.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks, where the workload leaves them open.")] = None,
    model: Annotated[str | None, typer.Option(help=f"A known model; {MODEL} by default.")] = None,
    hardware: Annotated[str | None, typer.Option(help=f"{DEVICES}; {DEVICE} by default.")] = None,
    cost: Annotated[Path | None, typer.Option(help="A cost file, instead of model and hardware.")] = None,
    planners: Annotated[str, typer.Option(help="Joined by commas, as in home,bags:g2n1,moldable.")] = "",
    steps: Annotated[int, typer.Option(help="Steps of each workload; one of a lengths file.", min=1)] = 20,
    shard_size: Annotated[int | None, typer.Option(help="Ranks over which FSDP2 shards; a node.", min=1)] = None,
    max_tokens_per_rank: Annotated[str, typer.Option(help="Cap: a number, auto or none.")] = "auto",
    seed: Annotated[int, typer.Option(help="Equal seeds give equal steps.", min=0)] = 0,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file; .md with tables beside it.")] = None,
) -> None:
    """Run steps of a workload through every planner on modelled hardware; see ``knapformer.predict.timeline``."""
    from knapformer.predict.presets import comparisons, planners_of, run_comparison
    from knapformer.predict.simulate_tables import markdown, planner_table

    if (preset is None) == (workload is None):
        raise ConfigurationError("give --preset or --workload, one of them")
    if preset is not None:
        others = {"ranks": ranks, "model": model, "hardware": hardware, "cost": cost, "shard-size": shard_size}
        given = [f"--{name}" for name, value in others.items() if value is not None]
        given += ["--planners"] * bool(planners) + ["--max-tokens-per-rank"] * (max_tokens_per_rank != "auto")
        if given:
            raise ConfigurationError(f"a preset has its own {', '.join(given)}: leave out one or the other")
        found = comparisons(preset)
        with progress_bar("simulating", steps * sum(len(planners_of(c)) for c in found)) as on_step:
            results = [run_comparison(c, num_steps=steps, seed=seed, on_step=on_step) for c in found]
    else:
        assert workload is not None
        drawn = _draw_steps(workload, ranks, steps, seed)
        results = [
            _simulate_one(
                workload, drawn, planners, model, hardware, cost, shard_size, parse_cap(max_tokens_per_rank), seed
            )
        ]
    content = {"schema": "knapformer.simulate/1", **stamp(), "hardware": _sources(results), "results": results}
    if output is not None:
        write_json(output, content)
        title = f"Simulated: {preset or workload}"
        output.with_suffix(".md").write_text(markdown(title, content["command"], results) + "\n")
    if as_json:
        print(json.dumps(content))
        return
    console = Console()
    for result in results:
        console.print(planner_table(f"{result['label']}: {result['model']}", result["planners"], console.width))
        ratios = ", ".join(f"{name} {value:.2f}" for name, value in result["ratios"].items())
        console.print(ratios, style="dim", soft_wrap=True)
        console.print()


def advise(
    lengths: Annotated[Path, typer.Argument(help="CSV or Parquet with length, or width, height, frames; or lengths.")],
    ranks: Annotated[int, typer.Option(help="Ranks that balance together.", min=1)],
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks with fast links among them.", min=1)] = None,
    model: Annotated[str, typer.Option(help="A known model.")] = MODEL,
    hardware: Annotated[str, typer.Option(help=f"{DEVICES}.")] = DEVICE,
    cost: Annotated[Path | None, typer.Option(help="A cost file of calibrate, for speed, γ and links.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Of a rank; the hardware's without.")] = None,
    tokens_per_rank: Annotated[int | None, typer.Option(help="Tokens that a rank loads.", min=1)] = None,
    shard_size: Annotated[int | None, typer.Option(help="Ranks over which FSDP2 shards; a node.", min=1)] = None,
    steps: Annotated[int, typer.Option(help="Steps to draw.", min=2)] = 20,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal steps.", min=0)] = 0,
    as_json: AsJson = False,
    output: Out = None,
) -> None:
    """Say what balancing would gain on a data set of your own, and how to set it up."""
    from knapformer.given.shapes import model_shape
    from knapformer.predict import advise as advisor
    from knapformer.predict.advise_page import advice_lines, advice_table
    from knapformer.predict.hardware import hardware as find_hardware
    from knapformer.predict.memory import MemoryModel
    from knapformer.predict.simulate import setting_of
    from knapformer.workloads.dataset import read_dataset

    device, shape = find_hardware(hardware), model_shape(model)
    tokens = read_dataset(lengths, shape)
    if not tokens.any():
        raise ConfigurationError(f"{lengths}: needs a sequence with tokens, got {len(tokens)} of length 0")
    if memory_gb is not None and not 0 < memory_gb < math.inf:
        raise ConfigurationError(f"--memory-gb must be a number above 0, got {memory_gb}")
    layer = device.cost(shape) if cost is None else CostModel.read(cost)
    layer = layer if ranks_per_node is None else layer.with_machine(ranks_per_node=ranks_per_node)
    shard = checked_shard_size(shard_size, ranks, layer.machine.ranks_per_node)
    memory = MemoryModel.of_model(model, shape, shard_size=shard)
    memory_bytes = device.memory_bytes if memory_gb is None else 1e9 * memory_gb
    with progress_bar("drawing steps", steps * advisor.num_ways(ranks)) as on_step:
        advice = advisor.advise(
            tokens,
            setting_of(layer, device, memory, num_ranks=ranks),
            memory,
            num_ranks=ranks,
            memory_bytes=memory_bytes,
            tokens_per_rank=tokens_per_rank,
            num_steps=steps,
            seed=seed,
            on_step=on_step,
        )
    content = {**advice.to_dict(), **stamp(), "model": model, "hardware": str(cost or hardware)}
    if output is not None:
        write_json(output, content)
    if as_json:
        print(json.dumps(content))
        return
    console = Console()
    console.print(advice_table(advice))
    for line in advice_lines(advice, device_name=device.name, is_measured=cost is not None, shard_size=shard):
        console.print(line, soft_wrap=True, highlight=False)


def _draw_steps(workload: str, ranks: int | None, steps: int, seed: int) -> list[Lengths]:
    from knapformer.predict.simulate import drawn_from

    if Path(workload).is_file():
        lengths = read_lengths(workload)
        if ranks not in (None, lengths.num_ranks):
            raise ConfigurationError(f"{workload} has lengths of {lengths.num_ranks} ranks, --ranks is {ranks}")
        return [lengths]
    if Path(workload).suffix == ".json":
        raise ConfigurationError(f"cannot read {workload}: there is no such file")
    draw = drawn_from(workload, ranks, seed)
    return [draw() for _ in range(steps)]


def _simulate_one(
    label: str,
    steps: list[Lengths],
    planners: str,
    model: str | None,
    hardware: str | None,
    cost: Path | None,
    shard_size: int | None,
    cap: int | Literal["auto"] | None,
    seed: int,
) -> dict[str, Any]:
    from knapformer.given.shapes import model_shape
    from knapformer.plans.spec import PlannerSpec
    from knapformer.predict.hardware import hardware as find_hardware
    from knapformer.predict.memory import MemoryModel
    from knapformer.predict.presets import ratios
    from knapformer.predict.simulate import all_planners, setting_of, simulate

    num_ranks = steps[0].num_ranks
    if not all(step.num_tokens for step in steps):
        raise ConfigurationError(f"{label}: a step without tokens cannot be compared")
    specs = [PlannerSpec.parse(name) for name in parse_names("--planners", planners)] or all_planners(num_ranks)
    if cost is not None:
        if (model, hardware, shard_size) != (None, None, None):
            raise ConfigurationError("--cost stands for --model, --hardware and --shard-size: leave them out")
        setting = setting_of(CostModel.read(cost), None, None, num_ranks=num_ranks)
        model = hardware = str(cost)
    else:
        model, hardware = model or MODEL, hardware or DEVICE
        device, shape = find_hardware(hardware), model_shape(model)
        shard_size = checked_shard_size(shard_size, num_ranks, device.cost(shape).machine.ranks_per_node)
        memory = MemoryModel.of_model(model, shape, shard_size=shard_size)
        setting = setting_of(device.cost(shape), device, memory, num_ranks=num_ranks)
    with progress_bar("simulating", len(steps) * len(specs)) as on_step:
        rows = simulate(steps, specs, setting, max_tokens_per_rank=cap, on_step=on_step)
    return {
        "label": label,
        "workload": label,
        "num_ranks": num_ranks,
        "model": model,
        "hardware": hardware,
        "shard_size": shard_size,
        "published": None,
        "steps": len(steps),
        "seed": seed,
        "planners": rows,
        "ratios": ratios(rows),
    }


def _sources(results: list[dict[str, Any]]) -> dict[str, Any]:
    from knapformer.predict.hardware import HARDWARE

    return {name: asdict(HARDWARE[name]) for name in {r["hardware"] for r in results} if name in HARDWARE}


def checked_shard_size(given: int | None, num_ranks: int, ranks_per_node: int) -> int:
    """The value of ``--shard-size``; without it as much of a node as divides the ranks.

    Raises:
        ConfigurationError: it does not divide the ranks.
    """
    shard = math.gcd(num_ranks, ranks_per_node) if given is None else given
    if num_ranks % shard:
        raise ConfigurationError(f"--shard-size must divide {num_ranks} ranks, got {shard}")
    return shard
