"""``knapformer calibrate``: fit the cost model to this device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from knapformer.cli.common import progress_bar, stamp, write_json
from knapformer.cli.options import MOST_TOKENS, Printed, Stand
from knapformer.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Fitting:
    """What is measured, and when it is good enough."""

    longest: Annotated[
        int | None, typer.Option(help="Tokens of the longest pack; else by the budget.", min=1, max=MOST_TOKENS)
    ] = None
    max_mape: Annotated[
        float, typer.Option(help="Held-out error in percent above which nothing is written.", min=0, max=100)
    ] = 10
    force: Annotated[bool, typer.Option(help="Write the file whatever the error.")] = False
    links: Annotated[bool, typer.Option(help="Under torchrun: measure links, and nothing else.")] = False
    cost: Annotated[Path | None, typer.Option(help="With --links: the cost file to put them into.")] = None


def calibrate(stand: Stand, fitting: Fitting, printed: Printed) -> None:
    """Fit the cost model to this device, test it on packs left out, and write a cost file."""
    stand.check()
    if fitting.cost is not None and not fitting.links:
        raise ConfigurationError("--cost is the file that --links puts links into: add --links, or leave it out")
    if fitting.links and fitting.cost is None and printed.output is not None:
        raise ConfigurationError("links are part of a model's cost file: name it with --cost, or leave --output out")
    content = _links(fitting.cost) if fitting.links else _fit(stand, fitting)
    if content is None:
        return
    content["measured"] |= stamp()
    lines = _link_lines(content["measured"]) if fitting.links else _fit_lines(content)
    if printed.as_json:
        print(json.dumps(content))
    else:
        Console(soft_wrap=True).print(*lines, sep="\n", highlight=False)
    if not fitting.links and not fitting.force:
        _check_error(content["measured"]["held_out_mape"], fitting.max_mape)
    if printed.output is not None:
        write_json(printed.output, content)


def _check_error(held_out_mape: float, most_percent: float) -> None:
    if 100 * held_out_mape > most_percent:
        raise ConfigurationError(
            f"the held-out MAPE is {100 * held_out_mape:.1f} %, above {most_percent:g} %: no file written. "
            "Quieten the machine, raise --budget or --repeats, or give --force"
        )


def _links(file: Path | None) -> dict[str, Any] | None:
    """The content of a cost file with links; None on ranks that have nothing to say."""
    from knapformer.given.cost_files import CostFile
    from knapformer.measure.calibrate_command import calibrate_links

    return calibrate_links(None if file is None else CostFile.read(file))


def _fit(stand: Stand, fitting: Fitting) -> dict[str, Any]:
    """The content of a cost file."""
    from knapformer.measure.calibrate_command import calibrate_to_cost_file
    from knapformer.measure.calibrate_model import NUM_FITTED, NUM_HELD_OUT

    stand_in = stand.choose()
    with progress_bar("calibrating", stand.repeats * (NUM_FITTED + NUM_HELD_OUT)) as on_pack:
        return calibrate_to_cost_file(
            stand_in, budget_s=stand.budget, repeats=stand.repeats, longest_tokens=fitting.longest, on_pack=on_pack
        )


def _link_lines(measured: dict[str, Any]) -> Iterator[str]:
    for name, link in measured["links"].items():
        speed = f"{link['bytes_per_s'] / 1e9:.3g} GB/s, latency {1e6 * link['latency_s']:.0f} µs"
        yield f"{name}: {speed} over {link['num_ranks']} ranks"


def _fit_lines(content: dict[str, Any]) -> Iterator[str]:
    measured = content["measured"]
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
