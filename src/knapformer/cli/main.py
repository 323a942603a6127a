"""The ``knapformer`` command: its subcommands, and how it fails.

torch is imported only where it is needed, so that planning starts fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from knapformer.cli.advise import advise
from knapformer.cli.bench import bench
from knapformer.cli.bench_planners import bench_planners
from knapformer.cli.calibrate import calibrate
from knapformer.cli.demo import demo
from knapformer.cli.names import list_names
from knapformer.cli.options import command
from knapformer.cli.plan import plan
from knapformer.cli.replay import replay
from knapformer.cli.report import report
from knapformer.cli.simulate import simulate
from knapformer.cli.workload import workload
from knapformer.errors import KnapFormerError
from knapformer.version import __version__

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

for subcommand in (demo, bench, plan, workload, simulate, advise, calibrate, replay, report):
    command(app)(subcommand)
command(app, "list")(list_names)
command(app, "bench-planners")(bench_planners)


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
        return _fail(error.format_message())  # type: ignore[attr-defined]  # every UsageError has it, see above
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
