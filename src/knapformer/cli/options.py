"""Options that several commands share, as dataclasses, and how a command takes them.

Typer reads a command's options from its signature. ``command`` spreads a parameter that is a dataclass into one option
for each field, and gives the command the dataclass again:

    @dataclass(frozen=True)
    class Draw:
        seed: Annotated[int, typer.Option(help="Equal seeds give equal steps.", min=0)] = 0

    def simulate(draw: Draw) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from knapformer.cli.common import check_output, checked_shard_size, parse_cap, parse_names
from knapformer.errors import ConfigurationError
from knapformer.plans.registry import PlannerSpec, planner_names
from knapformer.predict.hardware import HARDWARE
from knapformer.predict.subject import DEFAULT_HARDWARE, DEFAULT_MODEL, Subject, find_subject
from knapformer.workloads.workloads import workload_names

if TYPE_CHECKING:
    from knapformer.measure.runner import StandIn

MOST_RANKS, MOST_STEPS, MOST_TOKENS = 65_536, 10_000, 2**31 - 1
MOST_NODE, MOST_REPEATS, MOST_SECONDS, MOST_BLOCKS, MOST_SEED = 65_536, 1000, 86_400.0, 64, 2**63 - 1
"""What options accept; whether that much work is feasible, commands estimate before they begin."""

NAMES = ", ".join(workload_names())
"""Of workloads."""


OUTPUTS = ("output", "picture")
"""Options that name files to write, in every command that has them; checked before the command begins."""


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command; parameters that are dataclasses become options of their own."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        groups = {key: kind for key, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)}
        parameters = []
        for key, parameter in inspect.signature(function).parameters.items():
            if key in groups:
                parameters += _options_of(groups[key])
            else:
                parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[key]))

        @functools.wraps(function)
        def run(**values: Any) -> None:
            for option in OUTPUTS:
                check_output(option, values.get(option))
            for key, kind in groups.items():
                values[key] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            function(**values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions have none declared
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name)(run)
        return function

    return add


def _options_of(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name]
        )
        for field in fields(kind)
    ]


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default


@dataclass(frozen=True, slots=True)
class Printed:
    """Where results go."""

    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file to write.")] = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """Which steps are drawn."""

    ranks: Annotated[
        int | None, typer.Option(help="Ranks, where the workload leaves them open.", min=1, max=MOST_RANKS)
    ] = None
    seed: Annotated[int, typer.Option(help="Equal seeds give equal steps.", min=0, max=MOST_SEED)] = 0


@dataclass(frozen=True, slots=True)
class Compared:
    """Planners side by side, and their cap."""

    planners: Annotated[
        str, typer.Option(help=f"Joined by commas, of {planner_names()}; all but the references by default.")
    ] = ""
    max_tokens_per_rank: Annotated[str, typer.Option(help="Cap: a number, auto or none.")] = "auto"

    @property
    def specs(self) -> list[PlannerSpec]:
        """The planners that are named; none where the command chooses."""
        return [PlannerSpec.parse(name) for name in parse_names("--planners", self.planners)]

    @property
    def cap(self) -> int | str | None:
        """As ``make_plan`` takes it."""
        return parse_cap(self.max_tokens_per_rank)


@dataclass(frozen=True, slots=True)
class Target:
    """The model and the machine that are predicted."""

    model: Annotated[
        str | None, typer.Option(help=f"A known model; the workload's or the cost file's own, or {DEFAULT_MODEL}.")
    ] = None
    hardware: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(HARDWARE)}; {DEFAULT_HARDWARE} by default. With --cost for its memory alone."),
    ] = None
    cost: Annotated[
        Path | None, typer.Option(help="A cost file of calibrate, of this model's layers: speed, γ and links.")
    ] = None
    shard_size: Annotated[
        int | None, typer.Option(help="Ranks over which FSDP2 shards; a node.", min=1, max=MOST_RANKS)
    ] = None

    @property
    def named_hardware(self) -> str:
        """As it was named, or the default; the cost file where there is one."""
        return str(self.cost or (self.hardware or DEFAULT_HARDWARE).lower())

    def subject(self, workload_model: str | None = None) -> Subject:
        """What is predicted; ``workload_model`` trains on the lengths."""
        return find_subject(model=self.model, device=self.hardware, cost_file=self.cost, workload_model=workload_model)

    def shards(self, subject: Subject, num_ranks: int) -> int:
        """Ranks over which parameters are sharded."""
        if self.shard_size is not None and subject.shape is None:
            raise ConfigurationError(f"--shard-size needs a known model, got {subject.named}: name it with --model")
        return checked_shard_size(self.shard_size, num_ranks, subject.cost.machine.ranks_per_node)


@dataclass(frozen=True, slots=True)
class Stand:
    """The stand-in of a model that is run and timed on the device at hand."""

    model: Annotated[str, typer.Option(help="A known model, or demo.")] = "demo"
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None
    dtype: Annotated[str | None, typer.Option(help="float32 on the CPU, else bfloat16.")] = None
    blocks: Annotated[
        int, typer.Option(help="Double-stream and single-stream blocks, each.", min=1, max=MOST_BLOCKS)
    ] = 1
    recompute: Annotated[bool, typer.Option(help="Recompute blocks in backward.")] = False
    budget: Annotated[float, typer.Option(help="Seconds for calibrating, roughly.")] = 60.0
    repeats: Annotated[int, typer.Option(help="Measurements of each pack or rank.", min=1, max=MOST_REPEATS)] = 3

    def check(self) -> None:
        """Raise ``ConfigurationError`` for what can be seen before anything is built."""
        if not 0 < self.budget <= MOST_SECONDS:
            most = f"{MOST_SECONDS:,.0f} at most"
            raise ConfigurationError(f"--budget must be a number of seconds above 0, {most}, got {self.budget}")
        if self.device not in (None, "cpu", "cuda"):
            raise ConfigurationError(f"--device must be cpu or cuda, got {self.device!r}")

    def choose(self) -> StandIn:
        """What will be built, with the device at hand and its dtype."""
        import torch

        from knapformer.measure.runner import StandIn

        self.check()
        where = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if where.type == "cuda" and not torch.cuda.is_available():
            raise ConfigurationError("--device cuda: there is no CUDA device here")
        if where.type == "cpu":
            self._settle_cpu()
        return StandIn(
            model=self.model,
            dtype=self.dtype or ("float32" if where.type == "cpu" else "bfloat16"),
            device=where,
            recompute=self.recompute,
            num_blocks=self.blocks,
        )

    @staticmethod
    def _settle_cpu() -> None:
        """One thread, which keeps the memory that it frees: times are of this process alone."""
        import torch

        from knapformer.measure.heap import keep_freed_memory

        torch.set_num_threads(1)
        keep_freed_memory()
