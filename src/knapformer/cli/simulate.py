"""``knapformer simulate``: steps of a workload through every planner on modelled hardware."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from knapformer.cli.common import checked_shard_size, progress_bar, stamp, write_json
from knapformer.cli.options import DEFAULT_HARDWARE, DEFAULT_MODEL, NAMES, Compared, Drawn, Target
from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths, read_lengths
from knapformer.predict.presets import PRESETS


def simulate(
    drawn: Drawn,
    target: Target,
    compared: Compared,
    preset: Annotated[str | None, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = None,
    workload: Annotated[str | None, typer.Option(help=f"{NAMES}; or data codes; or a lengths file.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of each workload; one of a lengths file.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file; .md with tables beside it.")] = None,
) -> None:
    """Run steps of a workload through every planner on modelled hardware; see ``knapformer.predict.timeline``."""
    if (preset is None) == (workload is None):
        raise ConfigurationError("give --preset or --workload, one of them")
    if workload is None:
        assert preset is not None
        results = _preset_results(preset, drawn, target, compared, steps)
    else:
        results = [_simulate_one(workload, _draw_steps(workload, drawn, steps), drawn.seed, target, compared)]
    content = {"schema": "knapformer.simulate/1", **stamp(), "hardware": _sources(results), "results": results}
    if output is not None:
        from knapformer.predict.simulate_tables import markdown

        write_json(output, content)
        title = f"Simulated: {preset or workload}"
        output.with_suffix(".md").write_text(markdown(title, content["command"], results) + "\n")
    if as_json:
        print(json.dumps(content))
        return
    _print(results)


def _print(results: list[dict[str, Any]]) -> None:
    from knapformer.predict.simulate_tables import planner_table

    console = Console()
    for result in results:
        console.print(planner_table(f"{result['label']}: {result['model']}", result["planners"], console.width))
        ratios = ", ".join(f"{name} {value:.2f}" for name, value in result["ratios"].items())
        console.print(ratios, style="dim", soft_wrap=True)
        console.print()


def _preset_results(preset: str, drawn: Drawn, target: Target, compared: Compared, steps: int) -> list[dict[str, Any]]:
    from knapformer.predict.presets import comparisons, planners_of, run_comparison

    given = [f"--{key.replace('_', '-')}" for key, value in asdict(target).items() if value is not None]
    given += ["--ranks"] * (drawn.ranks is not None)
    given += ["--planners"] * bool(compared.planners)
    given += ["--max-tokens-per-rank"] * (compared.max_tokens_per_rank != "auto")
    if given:
        raise ConfigurationError(f"a preset has its own {', '.join(given)}: leave out one or the other")
    found = comparisons(preset)
    with progress_bar("simulating", steps * sum(len(planners_of(c)) for c in found)) as on_step:
        return [run_comparison(c, num_steps=steps, seed=drawn.seed, on_step=on_step) for c in found]


def _draw_steps(workload: str, drawn: Drawn, steps: int) -> list[Lengths]:
    from knapformer.predict.simulate import drawn_from

    if Path(workload).is_file():
        lengths = read_lengths(workload)
        if drawn.ranks not in (None, lengths.num_ranks):
            raise ConfigurationError(f"{workload} has lengths of {lengths.num_ranks} ranks, --ranks is {drawn.ranks}")
        return [lengths]
    if Path(workload).suffix == ".json":
        raise ConfigurationError(f"cannot read {workload}: there is no such file")
    draw = drawn_from(workload, drawn.ranks, drawn.seed)
    return [draw() for _ in range(steps)]


def _simulate_one(label: str, steps: list[Lengths], seed: int, target: Target, compared: Compared) -> dict[str, Any]:
    from knapformer.plans.registry import compared_planners
    from knapformer.predict.presets import ratios
    from knapformer.predict.simulate import simulate

    num_ranks = steps[0].num_ranks
    if not all(step.num_tokens for step in steps):
        raise ConfigurationError(f"{label}: a step without tokens cannot be compared")
    specs = compared.specs or compared_planners(num_ranks)
    setting, description = _setting(target, num_ranks)
    with progress_bar("simulating", len(steps) * len(specs)) as on_step:
        rows = simulate(steps, specs, setting, max_tokens_per_rank=compared.cap, on_step=on_step)
    return {
        "label": label,
        "workload": label,
        "num_ranks": num_ranks,
        **description,
        "published": None,
        "steps": len(steps),
        "seed": seed,
        "planners": rows,
        "ratios": ratios(rows),
    }


def _setting(target: Target, num_ranks: int) -> tuple[Any, dict[str, Any]]:
    """What is simulated, and what the results file says of it."""
    from knapformer.given.shapes import model_shape
    from knapformer.predict.hardware import hardware
    from knapformer.predict.memory import MemoryModel
    from knapformer.predict.simulate import setting_of

    if target.cost is not None:
        if (target.model, target.hardware, target.shard_size) != (None, None, None):
            raise ConfigurationError("--cost stands for --model, --hardware and --shard-size: leave them out")
        description = {"model": str(target.cost), "hardware": str(target.cost), "shard_size": None}
        return setting_of(CostModel.read(target.cost), None, None, num_ranks=num_ranks), description
    model, kind = target.model or DEFAULT_MODEL, target.hardware or DEFAULT_HARDWARE
    device, shape = hardware(kind), model_shape(model)
    shard_size = checked_shard_size(target.shard_size, num_ranks, device.cost(shape).machine.ranks_per_node)
    memory = MemoryModel.of_model(model, shape, shard_size=shard_size)
    setting = setting_of(device.cost(shape), device, memory, num_ranks=num_ranks)
    return setting, {"model": model, "hardware": kind, "shard_size": shard_size}


def _sources(results: list[dict[str, Any]]) -> dict[str, Any]:
    from knapformer.predict.hardware import HARDWARE

    return {name: asdict(HARDWARE[name]) for name in {r["hardware"] for r in results} if name in HARDWARE}
