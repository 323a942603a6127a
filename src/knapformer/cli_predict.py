"""The commands that predict: simulate, advise, calibrate and replay. Each reads its options and calls a function."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from knapformer.cost import CostModel
from knapformer.errors import ConfigurationError
from knapformer.lengths import Lengths, read_lengths

Out = Annotated[Path | None, typer.Option("--output", "-o", help="File to write; .md beside it for tables.")]
MOST_CAP_DIGITS = 12
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(simulate)
    app.command()(advise)
    app.command()(calibrate)
    app.command()(replay)


def simulate(
    preset: Annotated[str | None, typer.Option(help="knapformer, zellige or open-sora.")] = None,
    workload: Annotated[str | None, typer.Option(help="A workload's name or data codes; or a lengths file.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks, where the workload leaves them open.")] = None,
    model: Annotated[str, typer.Option(help="A known model.")] = "flux.1-dev",
    hardware: Annotated[str, typer.Option(help="a100, a800, a6000, h100, h200 or b200.")] = "h100",
    cost: Annotated[Path | None, typer.Option(help="A cost file, instead of model and hardware.")] = None,
    planners: Annotated[str, typer.Option(help="Joined by commas, as in home,bags:g2n1,moldable.")] = "",
    steps: Annotated[int, typer.Option(help="Steps of each workload.", min=1)] = 20,
    shard_size: Annotated[int, typer.Option(help="Ranks over which FSDP2 shards.", min=1)] = 8,
    max_tokens_per_rank: Annotated[str, typer.Option(help="Cap: a number, auto or none.")] = "auto",
    seed: Annotated[int, typer.Option(help="Equal seeds give equal steps.", min=0)] = 0,
    as_json: AsJson = False,
    output: Out = None,
) -> None:
    """Run steps of a workload through every planner on modelled hardware; see ``knapformer.bench.timeline``."""
    from knapformer.bench.presets import comparisons, planners_of, run_comparison
    from knapformer.bench.simulate_tables import markdown, planner_table

    if (preset is None) == (workload is None):
        raise ConfigurationError("give --preset or --workload, one of them")
    if preset is not None:
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
    model: Annotated[str, typer.Option(help="A known model.")] = "flux.1-dev",
    hardware: Annotated[str, typer.Option(help="a100, a800, a6000, h100, h200 or b200.")] = "h100",
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
    from knapformer.bench import advise as advisor
    from knapformer.bench.advise_page import advice_lines, advice_table
    from knapformer.bench.dataset import read_dataset
    from knapformer.bench.hardware import hardware as find_hardware
    from knapformer.bench.memory import MemoryModel
    from knapformer.bench.simulate import setting_of
    from knapformer.shapes import model_shape

    device, shape = find_hardware(hardware), model_shape(model)
    tokens = read_dataset(lengths, shape)
    if not tokens.any():
        raise ConfigurationError(f"{lengths}: needs a sequence with tokens, got {len(tokens)} of length 0")
    if memory_gb is not None and not 0 < memory_gb < math.inf:
        raise ConfigurationError(f"--memory-gb must be a number above 0, got {memory_gb}")
    layer = device.cost(shape) if cost is None else CostModel.read(cost)
    layer = layer if ranks_per_node is None else layer.with_machine(ranks_per_node=ranks_per_node)
    shard = math.gcd(ranks, layer.machine.ranks_per_node) if shard_size is None else shard_size
    if ranks % shard:
        raise ConfigurationError(f"--shard-size must divide {ranks} ranks, got {shard}")
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
    for line in advice_lines(advice, device_name=device.name, is_measured=cost is not None):
        console.print(line, soft_wrap=True, highlight=False)


def calibrate(
    model: Annotated[str, typer.Option(help="A known model, or demo.")] = "demo",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 on the CPU, else bfloat16.")] = None,
    blocks: Annotated[int, typer.Option(help="Double-stream and single-stream blocks to time, each.", min=1)] = 1,
    recompute: Annotated[bool, typer.Option(help="Recompute blocks in backward.")] = False,
    budget: Annotated[float, typer.Option(help="Seconds that it may take, roughly.")] = 60.0,
    longest: Annotated[int | None, typer.Option(help="Tokens of the longest pack; else by the budget.")] = None,
    repeats: Annotated[int, typer.Option(help="Measurements of each pack.", min=1)] = 3,
    max_mape: Annotated[float, typer.Option(help="Held-out error in percent above which nothing is written.")] = 10,
    force: Annotated[bool, typer.Option(help="Write the file whatever the error.")] = False,
    links: Annotated[bool, typer.Option(help="Under torchrun: measure links, and nothing else.")] = False,
    cost: Annotated[Path | None, typer.Option(help="With --links: the cost file to put them into.")] = None,
    as_json: AsJson = False,
    output: Out = None,
) -> None:
    """Fit the cost model to this device, test it on packs left out, and write a cost file."""
    from knapformer.bench.calibrate_command import calibrate_links, calibrate_to_cost_file
    from knapformer.bench.calibrate_model import NUM_FITTED, NUM_HELD_OUT

    if links:
        content = calibrate_links(None if cost is None else CostModel.read(cost))
    else:
        runner = _runner(model, device, dtype, blocks, recompute)
        with progress_bar("calibrating", repeats * (NUM_FITTED + NUM_HELD_OUT)) as on_pack:
            content = calibrate_to_cost_file(
                runner, model, budget_s=budget, repeats=repeats, longest_tokens=longest, on_pack=on_pack
            )
    if content is None:
        return
    content["measured"] |= stamp()
    mape = content["measured"].get("held_out_mape", 0.0)
    if as_json:
        print(json.dumps(content))
    else:
        Console(soft_wrap=True).print(*_calibration_lines(content), sep="\n", highlight=False)
    if 100 * mape > max_mape and not force:
        raise ConfigurationError(
            f"the held-out MAPE is {100 * mape:.1f} %, above {max_mape:g} %: no file written. "
            "Quieten the machine, raise --budget or --repeats, or give --force"
        )
    if output is not None:
        write_json(output, content)


def replay(
    plans: Annotated[list[Path] | None, typer.Argument(help="Plan files of the same ranks.")] = None,
    workload: Annotated[str | None, typer.Option(help="Instead of plan files: plan this workload.")] = None,
    planners: Annotated[str, typer.Option(help="For --workload, joined by commas.")] = "home,bags:g4n2,moldable",
    ranks: Annotated[int | None, typer.Option(help="Ranks, where the workload leaves them open.")] = None,
    scale: Annotated[int, typer.Option(help="Divide the workload's lengths by this.", min=1)] = 1,
    model: Annotated[str, typer.Option(help="A known model, or demo.")] = "demo",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 on the CPU, else bfloat16.")] = None,
    blocks: Annotated[int, typer.Option(help="Double-stream and single-stream blocks, each.", min=1)] = 1,
    recompute: Annotated[bool, typer.Option(help="Recompute blocks in backward.")] = False,
    cost: Annotated[Path | None, typer.Option(help="A cost file for this model; else calibrate now.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds for calibrating, roughly.")] = 60.0,
    repeats: Annotated[int, typer.Option(help="Measurements of each rank.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Of the workload.", min=0)] = 0,
    as_json: AsJson = False,
    output: Out = None,
) -> None:
    """Run each rank's share of plans on this one device, one rank after another, and compare with the prediction."""
    from knapformer.bench.replay import replay_table
    from knapformer.bench.replay_command import plan_workload, read_plans, replay_plans

    if bool(plans) == (workload is not None):
        raise ConfigurationError("give plan files or --workload, one of them")
    runner = _runner(model, device, dtype, blocks, recompute)
    content = None
    if cost is not None:
        CostModel.read(cost)  # a cost file; its measurements are no part of the model
        content = json.loads(cost.read_text())
    with progress_bar("replaying", None) as on_rank:
        if plans:
            found, lengths = read_plans(plans), None
        else:
            assert workload is not None
            found, lengths = {}, plan_workload(workload, ranks, scale, seed)
        result = replay_plans(
            runner,
            found,
            lengths,
            planners=[name for name in planners.split(",") if name],
            cost_file=content,
            budget_s=budget,
            repeats=repeats,
            on_rank=on_rank,
        )
    result |= {**stamp(), "model": model, "workload": workload, "scale": scale}
    if output is not None:
        write_json(output, result)
    if as_json:
        print(json.dumps(result))
        return
    console = Console(soft_wrap=True)
    console.print(replay_table(result["plans"]))
    console.print(
        "Each rank's forward and backward pass ran on this device. Communication is modelled, not measured.",
        style="dim",
    )


def _runner(model: str, device: str | None, dtype: str | None, blocks: int, recompute: bool) -> Any:
    import torch

    from knapformer.bench.heap import keep_freed_memory
    from knapformer.bench.runner import DTYPES, ModelRunner

    if device not in (None, "cpu", "cuda"):
        raise ConfigurationError(f"--device must be cpu or cuda, got {device!r}")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda: there is no CUDA device here")
    name = dtype or ("float32" if where.type == "cpu" else "bfloat16")
    if name not in DTYPES:
        raise ConfigurationError(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    if where.type == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()
    return ModelRunner.of_model(model, dtype=DTYPES[name], device=where, recompute=recompute, num_blocks=blocks)


def _calibration_lines(content: dict[str, Any]) -> Iterator[str]:
    measured = content["measured"]
    for name, link in measured.get("links", {}).items():
        speed = f"{link['bytes_per_s'] / 1e9:.3g} GB/s, latency {1e6 * link['latency_s']:.0f} µs"
        yield f"{name}: {speed} over {link['num_ranks']} ranks"
    if "fit" in measured:
        fit = measured["fit"]
        yield (
            f"{content['flops_per_s'] / 1e12:.4g} TFLOP/s in the linear phase, γ {content['gamma']:.3f}, "
            f"t0 {1e3 * fit['t0_s']:.2f} ms; R² {fit['r2']:.5f}"
        )
        yield (
            f"held-out MAPE {100 * measured['held_out_mape']:.2f} %, worst {100 * measured['held_out_worst']:.2f} %, "
            f"on {len(measured['held_out'])} packs of up to {measured['longest_tokens']:,} tokens; "
            f"{measured['seconds']:.0f} s"
        )


def _draw_steps(workload: str, ranks: int | None, steps: int, seed: int) -> list[Lengths]:
    from knapformer.bench.simulate import drawn_from

    if Path(workload).is_file():
        return [read_lengths(workload)]
    draw = drawn_from(workload, ranks, seed)
    return [draw() for _ in range(steps)]


def _simulate_one(
    label: str,
    steps: list[Lengths],
    planners: str,
    model: str,
    hardware: str,
    cost: Path | None,
    shard_size: int,
    cap: int | Literal["auto"] | None,
    seed: int,
) -> dict[str, Any]:
    from knapformer.bench.config import PlannerSpec
    from knapformer.bench.hardware import hardware as find_hardware
    from knapformer.bench.memory import MemoryModel
    from knapformer.bench.presets import ratios
    from knapformer.bench.simulate import all_planners, setting_of, simulate
    from knapformer.shapes import model_shape

    num_ranks = steps[0].num_ranks
    if not all(step.num_tokens for step in steps):
        raise ConfigurationError(f"{label}: a step without tokens cannot be compared")
    specs = [PlannerSpec.parse(name) for name in planners.split(",") if name] or all_planners(num_ranks)
    if cost is not None:
        setting = setting_of(CostModel.read(cost), None, None, num_ranks=num_ranks)
        model = hardware = str(cost)
    else:
        device, shape = find_hardware(hardware), model_shape(model)
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
    from knapformer.bench.hardware import HARDWARE

    return {name: asdict(HARDWARE[name]) for name in {r["hardware"] for r in results} if name in HARDWARE}


def parse_cap(text: str) -> int | Literal["auto"] | None:
    """The value of ``--max-tokens-per-rank``."""
    if text == "auto":
        return "auto"
    if text == "none":
        return None
    if not text.isdecimal():
        raise ConfigurationError(f"--max-tokens-per-rank must be a number, auto or none, got {text!r}")
    if len(text) > MOST_CAP_DIGITS:
        raise ConfigurationError(f"--max-tokens-per-rank must have at most {MOST_CAP_DIGITS} digits, got {text}")
    return int(text)


def stamp() -> dict[str, Any]:
    """When, by which command and version."""
    from knapformer.version import __version__

    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"created": created, "command": " ".join(["knapformer", *sys.argv[1:]]), "version": __version__}


def write_json(file: Path, content: Any) -> None:
    """Write a results file, and its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


@contextmanager
def progress_bar(name: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr; call what it yields after each of ``total`` pieces of work, None where that is open."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(name, total=total)
        yield lambda: bars.advance(task)
