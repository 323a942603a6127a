"""``knapformer simulate``: steps of a workload through every planner on modelled hardware."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from knapformer.cli.common import check_picture, companion, pictured, progress_bar, stamp, write_json
from knapformer.cli.options import MOST_STEPS, NAMES, Compared, Drawn, Target
from knapformer.errors import ConfigurationError
from knapformer.given.lengths import Lengths, read_lengths
from knapformer.predict.presets import PRESETS
from knapformer.workloads.registry import check_drawn
from knapformer.workloads.workloads import find_workload


def simulate(
    drawn: Drawn,
    target: Target,
    compared: Compared,
    preset: Annotated[str | None, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = None,
    workload: Annotated[str | None, typer.Option(help=f"{NAMES}; or data codes; or a lengths file.")] = None,
    steps: Annotated[
        int, typer.Option(help="Steps of each workload; one of a lengths file.", min=1, max=MOST_STEPS)
    ] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file; .md with tables beside it.")] = None,
    picture: Annotated[Path | None, typer.Option(help="SVG file for the tables as they are printed.")] = None,
) -> None:
    """Run steps of a workload through every planner on modelled hardware; see ``knapformer.predict.timeline``."""
    if (preset is None) == (workload is None):
        raise ConfigurationError("give --preset or --workload, one of them")
    check_picture(picture, as_json)
    tables = None if output is None else companion(output, ".md")
    if workload is None:
        assert preset is not None
        results = _preset_results(preset, drawn, target, compared, steps)
    else:
        results = [_simulate_one(workload, drawn, steps, target, compared)]
    content = {"schema": "knapformer.simulate/1", **stamp(), "hardware": _sources(results), "results": results}
    if output is not None and tables is not None:
        from knapformer.predict.simulate_tables import markdown

        write_json(output, content)
        title = f"Simulated: {preset or workload}"
        tables.write_text(markdown(title, content["command"], results) + "\n")
    if as_json:
        print(json.dumps(content))
        return
    with pictured(picture, f"knapformer simulate {preset or workload}") as console:
        _print(console, results)


def _print(console: Console, results: list[dict[str, Any]]) -> None:
    from knapformer.predict.fitting import fitting_lines
    from knapformer.predict.presets import ratio_lines
    from knapformer.predict.simulate_tables import planner_table, reason_lines, subject_line

    for result in results:
        console.print(planner_table(result["label"], result["planners"], console.width))
        console.print(subject_line(result), soft_wrap=True, highlight=False, markup=False)
        for line in fitting_lines(result["planners"]):
            console.print(line, style="red", soft_wrap=True, highlight=False, markup=False)
        for line in [*ratio_lines(result["ratios"]), *reason_lines(result["planners"])]:
            console.print(line, style="dim", soft_wrap=True, highlight=False, markup=False)
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


def _draw_steps(workload: str, drawn: Drawn, steps: int) -> tuple[list[Lengths], str | None]:
    """The steps, and the model that trains on them where that is known."""
    from knapformer.predict.simulate import drawn_from

    if Path(workload).is_file():
        lengths = read_lengths(workload)
        if drawn.ranks not in (None, lengths.num_ranks):
            raise ConfigurationError(f"{workload} has lengths of {lengths.num_ranks} ranks, --ranks is {drawn.ranks}")
        return [lengths], None
    if Path(workload).suffix == ".json":
        raise ConfigurationError(f"cannot read {workload}: there is no such file")
    draw = drawn_from(workload, drawn.ranks, drawn.seed)
    first = draw()
    check_drawn(steps, max(first.num_sequences, first.num_ranks), "fewer --steps or --ranks")
    return [first, *(draw() for _ in range(steps - 1))], find_workload(workload).model


def _simulate_one(label: str, drawn: Drawn, num_steps: int, target: Target, compared: Compared) -> dict[str, Any]:
    from knapformer.plans.registry import compared_planners
    from knapformer.predict.presets import ratios
    from knapformer.predict.simulate import setting_for, simulate

    steps, workload_model = _draw_steps(label, drawn, num_steps)
    num_ranks = steps[0].num_ranks
    if not all(step.num_tokens for step in steps):
        raise ConfigurationError(f"{label}: a step without tokens cannot be compared")
    specs, cap = compared.specs or compared_planners(num_ranks), compared.cap
    subject = target.subject(workload_model)
    shard_size = target.shards(subject, num_ranks)
    setting = setting_for(subject, subject.memory(shard_size), num_ranks=num_ranks)
    with progress_bar("simulating", len(steps) * len(specs)) as on_step:
        rows = simulate(steps, specs, setting, max_tokens_per_rank=cap, on_step=on_step)
    return {
        "label": label,
        "workload": label,
        "num_ranks": num_ranks,
        **subject.describe(),
        "hardware": target.named_hardware,
        "shard_size": None if setting.memory is None else shard_size,
        "published": None,
        "steps": len(steps),
        "seed": drawn.seed,
        "planners": rows,
        "ratios": ratios(rows),
    }


def _sources(results: list[dict[str, Any]]) -> dict[str, Any]:
    from knapformer.predict.hardware import HARDWARE

    return {name: asdict(HARDWARE[name]) for name in {r["hardware"] for r in results} if name in HARDWARE}
