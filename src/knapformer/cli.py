"""The ``knapformer`` command. Each subcommand reads its options and calls one function.

torch is imported only where it is needed, so that planning starts fast.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from knapformer.cost import CostModel
from knapformer.errors import ConfigurationError, KnapFormerError
from knapformer.lengths import Lengths, read_lengths
from knapformer.topology import Topology

app = typer.Typer(
    name="knapformer",
    help="Straggler-free training of Diffusion Transformers on mixed image resolutions and video.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

UsageError: type[Exception] = typer.BadParameter.__mro__[2]
"""The base of errors in the command line itself. Typer had it from click, and now has its own."""

Out = Annotated[Path | None, typer.Option("--output", "-o", help="File to write.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Expected errors become one line on stderr and exit code 2.

    Args:
        arguments: what follows the program's name; by default the process's own.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        result = app(args=list(arguments) or ["--help"], prog_name="knapformer", standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        print("knapformer: interrupted", file=sys.stderr)
        return 130
    except UsageError as error:
        return _fail(error.format_message())  # type: ignore[attr-defined]
    except (KnapFormerError, OSError) as error:
        return _fail(str(error))
    return result if isinstance(result, int) else 0


def _fail(message: str) -> int:
    print("knapformer: " + " ".join(message.split()), file=sys.stderr)
    return 2


@app.callback()
def _root() -> None:
    """Straggler-free training of Diffusion Transformers on mixed image resolutions and video."""


@app.command()
def plan(
    lengths: Annotated[Path, typer.Argument(help="{\"lengths\": [[rank 0's lengths], [rank 1's], …]}")],
    planner: Annotated[str, typer.Option(help="home, whole, ulysses, bags or moldable.")] = "moldable",
    topology: Annotated[str | None, typer.Option(help="Bags, as in g1n2+g2n1.")] = None,
    model: Annotated[str | None, typer.Option(help="A known model; flux.1-dev without --cost.")] = None,
    cost: Annotated[Path | None, typer.Option(help="A cost file (JSON).")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks with fast links among them.")] = None,
    max_tokens_per_rank: Annotated[str, typer.Option(help="Cap: a number, auto or none.")] = "auto",
    as_json: AsJson = False,
    output: Out = None,
) -> None:
    """Place the sequences of one step and say what that would gain."""
    from knapformer.planners import evaluate, make_plan

    model_cost = _read_cost(model, cost, ranks_per_node)
    layout = None if topology is None else Topology.parse(topology, ranks_per_node)
    step_lengths = read_lengths(lengths)
    cap = _parse_cap(max_tokens_per_rank)
    result, plan_ms = _timed(
        lambda: make_plan(step_lengths, planner=planner, topology=layout, cost=model_cost, max_tokens_per_rank=cap)
    )
    evaluation = evaluate(result, model_cost)
    if output is not None:
        output.write_text(json.dumps(result.to_dict()) + "\n")
    summary = {
        "planner": planner,
        "num_ranks": result.world_size,
        "num_sequences": result.num_sequences,
        "num_tokens": step_lengths.num_tokens,
        "makespan_s": evaluation.makespan_s,
        "step_time_s": evaluation.step_time_s,
        "lower_bound_s": evaluation.lower_bound_s,
        "tight_bound_s": evaluation.tight_bound_s,
        "discrepancy": evaluation.discrepancy,
        "bytes": evaluation.bytes,
        "num_split": evaluation.num_split,
        "max_rank_tokens": int(result.rank_tokens.max()),
        "max_tokens_per_rank": list(result.max_tokens_per_rank),
        "plan_ms": plan_ms,
    }
    if as_json:
        print(json.dumps(summary))
        return
    from knapformer.report.grid import plan_table

    console = Console()
    home = evaluate(make_plan(step_lengths, planner="home", cost=model_cost, max_tokens_per_rank=None), model_cost)
    console.print(_summary_table(summary, home.makespan_s))
    console.print(plan_table(result, evaluation, width=console.width))


@app.command()
def workload(
    name: Annotated[str, typer.Argument(help="A workload's name or data codes, as in g2b4i256f1s0,g1b1i512f85s1.")],
    ranks: Annotated[int | None, typer.Option(help="Ranks, where the workload leaves them open.")] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal lengths.")] = 0,
    output: Out = None,
) -> None:
    """Draw the sequence lengths of one step of a published workload."""
    from knapformer.bench.workloads import workload as draw_workload

    rows = draw_workload(name, seed=seed, num_ranks=ranks)
    text = json.dumps({"lengths": rows})
    if output is None:
        print(text)
        return
    output.write_text(text + "\n")
    lengths = Lengths.from_ranks(rows)
    print(f"{output}: {lengths.num_sequences} sequences, {lengths.num_tokens:,} tokens on {lengths.num_ranks} ranks")


def _read_cost(model: str | None, path: Path | None, ranks_per_node: int | None) -> CostModel:
    if model is not None and path is not None:
        raise ConfigurationError("give --model or --cost, not both")
    found = CostModel.from_preset(model or "flux.1-dev") if path is None else CostModel.read(path)
    return found if ranks_per_node is None else found.with_machine(ranks_per_node=ranks_per_node)


def _parse_cap(text: str) -> int | str | None:
    if text in ("none", "auto"):
        return None if text == "none" else text
    if not text.isdecimal():
        raise ConfigurationError(f"--max-tokens-per-rank must be a number, auto or none, got {text!r}")
    return int(text)


def _timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the median milliseconds of a few calls: one where that takes long."""
    times_ms: list[float] = []
    while len(times_ms) < 5 and sum(times_ms) < 200:
        start = time.perf_counter()
        result = make()
        times_ms.append(1e3 * (time.perf_counter() - start))
    return result, statistics.median(times_ms)


def _summary_table(summary: dict[str, Any], home_makespan_s: float) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    makespan_s, bound_s = summary["makespan_s"], summary["lower_bound_s"]
    over_bound = f"{makespan_s / bound_s:.4f} × the lower bound of {bound_s * 1e3:.3f} ms" if bound_s else "no work"
    speedup = f", {home_makespan_s / makespan_s:.2f} × faster than home" if makespan_s else ""
    caps = summary["max_tokens_per_rank"]
    cap = f", cap {max(caps):,}" if caps else ", no cap"
    sizes = "{num_sequences} sequences, {num_tokens:,} tokens on {num_ranks} ranks".format_map(summary)
    for name, value in (
        ("plan", f"{summary['planner']}, {summary['plan_ms']:.2f} ms"),
        ("step", sizes),
        ("makespan", f"{makespan_s * 1e3:.3f} ms a layer's forward, {over_bound}{speedup}"),
        ("training step", f"{summary['step_time_s']:.4g} s predicted"),
        ("discrepancy", f"{100 * summary['discrepancy']:.2f} %"),
        ("split", f"{summary['num_split']} sequences, {summary['bytes'] / 1e6:,.1f} MB exchanged a layer's forward"),
        ("tokens", f"{summary['max_rank_tokens']:,} on the fullest rank{cap}"),
    ):
        table.add_row(name, value)
    return table
