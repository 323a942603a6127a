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
from knapformer.cli.options import Printed, Stand
from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel


@dataclass(frozen=True, slots=True)
class Fitting:
    """What is measured, and when it is good enough."""

    longest: Annotated[int | None, typer.Option(help="Tokens of the longest pack; else by the budget.")] = None
    max_mape: Annotated[float, typer.Option(help="Held-out error in percent above which nothing is written.")] = 10
    force: Annotated[bool, typer.Option(help="Write the file whatever the error.")] = False
    links: Annotated[bool, typer.Option(help="Under torchrun: measure links, and nothing else.")] = False
    cost: Annotated[Path | None, typer.Option(help="With --links: the cost file to put them into.")] = None


def calibrate(stand: Stand, fitting: Fitting, printed: Printed) -> None:
    """Fit the cost model to this device, test it on packs left out, and write a cost file."""
    stand.check()
    content = _measure(stand, fitting)
    if content is None:
        return
    content["measured"] |= stamp()
    mape = content["measured"].get("held_out_mape", 0.0)
    if printed.as_json:
        print(json.dumps(content))
    else:
        Console(soft_wrap=True).print(*_calibration_lines(content), sep="\n", highlight=False)
    if 100 * mape > fitting.max_mape and not fitting.force:
        raise ConfigurationError(
            f"the held-out MAPE is {100 * mape:.1f} %, above {fitting.max_mape:g} %: no file written. "
            "Quieten the machine, raise --budget or --repeats, or give --force"
        )
    if printed.output is not None:
        write_json(printed.output, content)


def _measure(stand: Stand, fitting: Fitting) -> dict[str, Any] | None:
    """A cost file's content; None on ranks that have nothing to say."""
    from knapformer.measure.calibrate_command import calibrate_links, calibrate_to_cost_file
    from knapformer.measure.calibrate_model import NUM_FITTED, NUM_HELD_OUT

    if fitting.links:
        return calibrate_links(None if fitting.cost is None else CostModel.read(fitting.cost))
    runner = stand.build()
    with progress_bar("calibrating", stand.repeats * (NUM_FITTED + NUM_HELD_OUT)) as on_pack:
        return calibrate_to_cost_file(
            runner,
            stand.model,
            budget_s=stand.budget,
            repeats=stand.repeats,
            longest_tokens=fitting.longest,
            on_pack=on_pack,
        )


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
