"""``knapformer workload``: the lengths of one step of a published workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from knapformer.cli.common import write_text
from knapformer.cli.options import NAMES, Drawn
from knapformer.given.lengths import Lengths
from knapformer.workloads.workloads import workload as draw_workload


def workload(
    name: Annotated[str, typer.Argument(help=f"{NAMES}; or data codes, as in g2b4i256f1s0,g1b1i512f85s1.")],
    drawn: Drawn,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file to write.")] = None,
) -> None:
    """Draw the sequence lengths of one step of a published workload."""
    rows = draw_workload(name, seed=drawn.seed, num_ranks=drawn.ranks)
    text = json.dumps({"lengths": rows})
    if output is None:
        print(text)
        return
    write_text(output, text + "\n")
    lengths = Lengths.from_ranks(rows)
    print(f"{output}: {lengths.num_sequences} sequences, {lengths.num_tokens:,} tokens on {lengths.num_ranks} ranks")
