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
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from knapformer.cli import measure, planners, predict
from knapformer.cli.common import AsJson, Out, parse_cap, parse_names
from knapformer.demo.config import DEMO_CODES, DEMO_STEPS
from knapformer.errors import ConfigurationError, KnapFormerError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths, read_lengths
from knapformer.given.shapes import DEMO_HEAD_WIDTH, DEMO_HEADS
from knapformer.given.topology import Topology
from knapformer.plans.plan import Plan
from knapformer.version import __version__

if TYPE_CHECKING:
    from knapformer.plans.planners import Evaluation

app = typer.Typer(
    name="knapformer",
    help="Straggler-free training of Diffusion Transformers on mixed image resolutions and video.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

UsageError: type[Exception] = typer.BadParameter.__mro__[2]
"""The base of errors in the command line itself. Typer had it from click, and now has its own."""

predict.register(app)
measure.register(app)
planners.register(app)

FILE_WIDTH = 160
"""Characters of a line that goes to a file or to another program."""

DEMO_FILE, BENCH_FILE = Path("runs/demo.json"), Path("runs/bench.json")


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
    except KnapFormerError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    return result if isinstance(result, int) else 0


def _fail(message: str) -> int:
    print("knapformer: " + " ".join(message.split()), file=sys.stderr)
    return 2


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Straggler-free training of Diffusion Transformers on mixed image resolutions and video."""


@app.command()
def plan(
    lengths: Annotated[Path, typer.Argument(help="{\"lengths\": [[rank 0's lengths], [rank 1's], …]}")],
    planner: Annotated[str, typer.Option(help="home, whole, ulysses, bags or moldable.")] = "moldable",
    topology: Annotated[str | None, typer.Option(help="For --planner bags, as in g1n2+g2n1.")] = None,
    model: Annotated[str | None, typer.Option(help="A known model; flux.1-dev without --cost.")] = None,
    cost: Annotated[Path | None, typer.Option(help="A cost file (JSON).")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks with fast links among them.")] = None,
    max_tokens_per_rank: Annotated[str, typer.Option(help="Cap: a number, auto or none.")] = "auto",
    as_json: AsJson = False,
    picture: Annotated[Path | None, typer.Option(help="SVG file for the tables as they are printed.")] = None,
    output: Out = None,
) -> None:
    """Place the sequences of one step and say what that would gain."""
    from knapformer.plans.planners import evaluate, make_plan

    if picture is not None and as_json:
        raise ConfigurationError("--picture draws the tables, which --json leaves out: give one of them")
    if topology is not None and planner != "bags":
        raise ConfigurationError(f"--topology names bags, which {planner} does not use: add --planner bags")
    model_cost = _read_cost(model, cost, ranks_per_node)
    layout = None if topology is None else Topology.parse(topology, ranks_per_node)
    step_lengths = read_lengths(lengths)
    cap = parse_cap(max_tokens_per_rank)
    result, plan_ms = _timed(
        lambda: make_plan(step_lengths, planner=planner, topology=layout, cost=model_cost, max_tokens_per_rank=cap)
    )
    evaluation = evaluate(result, model_cost)
    if output is not None:
        output.write_text(json.dumps(result.to_dict()) + "\n")
    summary = _plan_summary(result, evaluation, plan_ms)
    if as_json:
        print(json.dumps(summary))
        return
    from knapformer.report.grid import GRID_LEGEND, plan_table

    console = Console(record=picture is not None)
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    home = evaluate(make_plan(step_lengths, planner="home", cost=model_cost, max_tokens_per_rank=None), model_cost)
    console.print(_summary_table(summary, home.makespan_s))
    console.print(plan_table(result, evaluation, width=console.width))
    console.print(GRID_LEGEND, style="dim", highlight=False, markup=False)
    if picture is not None:
        console.save_svg(str(picture), title=f"knapformer plan {lengths.name} --planner {planner}")


@app.command()
def workload(
    name: Annotated[str, typer.Argument(help="A workload's name or data codes, as in g2b4i256f1s0,g1b1i512f85s1.")],
    ranks: Annotated[int | None, typer.Option(help="Ranks, where the workload leaves them open.")] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal lengths.", min=0)] = 0,
    output: Out = None,
) -> None:
    """Draw the sequence lengths of one step of a published workload."""
    from knapformer.workloads.workloads import workload as draw_workload

    rows = draw_workload(name, seed=seed, num_ranks=ranks)
    text = json.dumps({"lengths": rows})
    if output is None:
        print(text)
        return
    output.write_text(text + "\n")
    lengths = Lengths.from_ranks(rows)
    print(f"{output}: {lengths.num_sequences} sequences, {lengths.num_tokens:,} tokens on {lengths.num_ranks} ranks")


@app.command("list")
def list_names() -> None:
    """Print the names that the other commands know."""
    from knapformer.given.shapes import MODEL_SHAPES
    from knapformer.plans.planners import PLANNERS
    from knapformer.predict.hardware import HARDWARE
    from knapformer.workloads.workloads import workload_names

    table = Table(box=None, show_header=False, pad_edge=False)
    for kind, names in (
        ("planners", PLANNERS),
        ("models", MODEL_SHAPES),
        ("hardware", HARDWARE),
        ("workloads", [*workload_names(), "data codes, as in g2b4i256f1s0"]),
    ):
        table.add_row(f"[bold]{kind}", ", ".join(names))
    Console().print(table, highlight=False)


@app.command()
def demo(
    ranks: Annotated[int | None, typer.Option(help="Processes; as many as cores (2 to 8), or all GPUs.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Results file; the page goes beside it.")] = DEMO_FILE,
) -> None:
    """Train a small MMDiT on images and a video, with and without balancing, and show the difference."""
    from knapformer.demo.config import TrainConfig, default_planners
    from knapformer.demo.launch import default_num_ranks

    num_ranks = default_num_ranks() if ranks is None else ranks
    config = TrainConfig(planners=default_planners(max(num_ranks, 1)))
    _compare(config, num_ranks, output)


@app.command()
def bench(
    codes: Annotated[str, typer.Option(help="Data codes or one of KnapFormer's scenarios.")] = DEMO_CODES,
    planners: Annotated[str, typer.Option(help="Joined by commas, as in home,bags:g2n1,moldable.")] = "",
    ranks: Annotated[int | None, typer.Option(help="Processes to start; torchrun's own where it started them.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of each planner.")] = DEMO_STEPS,
    warmup_steps: Annotated[int, typer.Option(help="First steps that are not timed.")] = 2,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = DEMO_HEADS,
    head_width: Annotated[int, typer.Option(help="Channels of a head.")] = DEMO_HEAD_WIDTH,
    double_blocks: Annotated[int, typer.Option(help="Double-stream blocks.")] = 1,
    single_blocks: Annotated[int, typer.Option(help="Single-stream blocks.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, float64 or bfloat16.")] = "float32",
    checkpoint: Annotated[str, typer.Option(help="Recompute nothing, each block or attention alone.")] = "none",
    shard_size: Annotated[int | None, typer.Option(help="Ranks over which FSDP2 shards the parameters.")] = None,
    reshard: Annotated[bool, typer.Option(help="Free a block's parameters between its passes.")] = True,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-3,
    max_text_tokens: Annotated[int, typer.Option(help="Longer captions are cut.")] = 48,
    max_tokens_per_rank: Annotated[str, typer.Option(help="Cap: a number, auto or none.")] = "auto",
    overlap: Annotated[bool, typer.Option(help="Attend to whole sequences during the exchange.")] = True,
    cost: Annotated[Path | None, typer.Option(help="A cost file; without it the bench calibrates first.")] = None,
    seed: Annotated[int, typer.Option(help="Of samples and initial parameters.", min=0)] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Results file; the page goes beside it.")] = BENCH_FILE,
) -> None:
    """The demo with everything settable; under torchrun it uses the ranks that it is given."""
    from knapformer.demo.config import TrainConfig, default_planners
    from knapformer.demo.launch import default_num_ranks, given_num_ranks
    from knapformer.plans.spec import PlannerSpec

    num_ranks = (given_num_ranks() or default_num_ranks()) if ranks is None else ranks
    chosen = [PlannerSpec.parse(name) for name in parse_names("--planners", planners)]
    config = TrainConfig(
        codes=codes,
        planners=tuple(chosen) or default_planners(max(num_ranks, 1)),
        num_heads=heads,
        head_width=head_width,
        num_double_blocks=double_blocks,
        num_single_blocks=single_blocks,
        steps=steps,
        warmup_steps=warmup_steps,
        dtype=dtype,
        checkpoint=checkpoint,
        shard_size=shard_size,
        reshard_after_forward=reshard,
        learning_rate=learning_rate,
        max_text_tokens=max_text_tokens,
        max_tokens_per_rank=parse_cap(max_tokens_per_rank),
        overlap=overlap,
        cost=None if cost is None else CostModel.read(cost).to_dict(),
        seed=seed,
    )
    _compare(config, num_ranks, output)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="A results file of demo or bench.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="HTML file; beside the results file by default.")
    ] = None,
) -> None:
    """Make the HTML page of a results file."""
    try:
        content = json.loads(results.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{results} is not JSON: {error}") from None
    page = _write_page(content, results.with_suffix(".html") if output is None else output)
    print(page)


def _compare(config: Any, num_ranks: int, output: Path) -> None:
    from knapformer.demo.launch import run_comparison
    from knapformer.demo.results import calibration_line, explanation, results_table

    console = Console()
    result = run_comparison(config, num_ranks=num_ranks)
    if result is None:
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result) + "\n")
    console.print(calibration_line(result), highlight=False)
    console.print(results_table(result["summary"]))
    console.print(explanation(result), style="dim", highlight=False)
    console.print(f"{output}, {_write_page(result, output.with_suffix('.html'))}", style="dim")


def _write_page(content: Any, file: Path) -> Path:
    from knapformer.report.page import render_page

    if not isinstance(content, dict):
        raise ConfigurationError(f"a results file is a JSON object, got {type(content).__name__}")
    file.write_text(render_page(content))
    return file


def _read_cost(model: str | None, path: Path | None, ranks_per_node: int | None) -> CostModel:
    if model is not None and path is not None:
        raise ConfigurationError("give --model or --cost, not both")
    found = CostModel.from_preset(model or "flux.1-dev") if path is None else CostModel.read(path)
    return found if ranks_per_node is None else found.with_machine(ranks_per_node=ranks_per_node)


def _timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the median milliseconds of a few calls: one where that takes long."""
    times_ms: list[float] = []
    while len(times_ms) < 5 and sum(times_ms) < 200:
        start = time.perf_counter()
        result = make()
        times_ms.append(1e3 * (time.perf_counter() - start))
    return result, statistics.median(times_ms)


def _plan_summary(result: Plan, evaluation: Evaluation, plan_ms: float) -> dict[str, Any]:
    """What ``plan --json`` prints; times and bytes are one layer's forward, but for the step's."""
    return {
        "planner": result.planner,
        "num_ranks": result.world_size,
        "num_sequences": result.num_sequences,
        "num_tokens": int(result.lengths.sum()),
        "makespan_s": evaluation.makespan_s,
        "step_time_s": evaluation.step_time_s,
        "lower_bound_s": evaluation.lower_bound_s,
        "tight_bound_s": evaluation.tight_bound_s,
        "discrepancy": evaluation.discrepancy,
        "bytes": evaluation.bytes,
        "moved_tokens": evaluation.moved_tokens,
        "num_split": evaluation.num_split,
        "max_rank_tokens": int(result.rank_tokens.max()),
        "max_tokens_per_rank": list(result.max_tokens_per_rank),
        "plan_ms": plan_ms,
    }


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
        ("tokens", f"{summary['max_rank_tokens']:,} on the fullest rank{cap}; {summary['moved_tokens']:,} leave home"),
    ):
        table.add_row(name, value)
    return table
