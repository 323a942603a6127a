"""The commands that measure on one device: calibrate and replay. Each reads its options and calls a function."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from knapformer.cli.common import AsJson, Out, parse_names, progress_bar, stamp, write_json
from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(calibrate)
    app.command()(replay)


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
    from knapformer.measure.calibrate_command import calibrate_links, calibrate_to_cost_file
    from knapformer.measure.calibrate_model import NUM_FITTED, NUM_HELD_OUT

    _check_budget(budget)
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
    from knapformer.measure.replay import replay_table
    from knapformer.measure.replay_command import plan_workload, read_cost_file, read_plans, replay_plans

    if bool(plans) == (workload is not None):
        raise ConfigurationError("give plan files or --workload, one of them")
    _check_budget(budget)
    runner = _runner(model, device, dtype, blocks, recompute)
    content = None if cost is None else read_cost_file(cost, model, runner)
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
            planners=parse_names("--planners", planners),
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


def _check_budget(seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise ConfigurationError(f"--budget must be a number of seconds above 0, got {seconds}")


def _runner(model: str, device: str | None, dtype: str | None, blocks: int, recompute: bool) -> Any:
    import torch

    from knapformer.measure.heap import keep_freed_memory
    from knapformer.measure.runner import DTYPES, ModelRunner

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
