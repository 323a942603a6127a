"""What ``knapformer simulate --preset`` runs: published comparisons, on the hardware that they name where they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from knapformer.errors import ConfigurationError
from knapformer.given.shapes import model_shape
from knapformer.plans.registry import PlannerSpec, compared_planners
from knapformer.predict.hardware import hardware
from knapformer.predict.memory import MemoryModel
from knapformer.predict.simulate import best_bags, drawn_from, setting_of, simulate
from knapformer.predict.subject import BY_WORKLOAD
from knapformer.predict.words import than
from knapformer.workloads.codes import SCENARIOS
from knapformer.workloads.registry import check_drawn
from knapformer.workloads.workloads import find_workload

BAGS_OF_32 = ("bags:g1n32", "bags:g2n16", "bags:g4n8", "bags:g8n4")
MIXED_BAGS = {8: "bags:g1n2+g2n1+g4n1", 16: "bags:g1n4+g4n1+g8n1", 32: "bags:g1n8+g8n1+g16n1"}
"""Several sizes, after KnapFormer's default for 8 ranks. Which layout Zellige compares with is not published."""

VIDEO_SHARES = (0.35, 0.40, 0.45, 0.50, 0.55, 0.60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One workload and what it runs on.

    Attributes:
        label: for the table.
        workload: its name; see ``knapformer.workloads.workloads``.
        num_ranks: where the workload leaves them open.
        model: a known model.
        hardware: a known kind of node.
        shard_size: ranks over which FSDP2 shards.
        planners: to compare; empty means all.
        published: what others report for it, by name.
    """

    label: str
    workload: str
    num_ranks: int
    model: str
    hardware: str
    shard_size: int
    planners: tuple[str, ...] = ()
    published: Mapping[str, str] | None = None


def _knapformer() -> list[Comparison]:
    planners = ("home", *BAGS_OF_32, "moldable")
    return [
        Comparison(
            label=name,
            workload=SCENARIOS[name],
            num_ranks=32,
            model="flux.1-dev",
            hardware="h100",
            shard_size=4 if name == "joint" else 8,
            planners=planners,
            published={"best bags over home": "2 to 3" if name != "lowres" else "about 1", "discrepancy": "below 1 %"},
        )
        for name in ("lowres", "mixres", "joint")
    ]


def _zellige() -> list[Comparison]:
    sizes = [
        ("8 A800, 10 s, 350K", 8, 350_000, 10, "a800", None),
        ("8 A800, 10 s, 125K", 8, 125_000, 10, "a800", None),
        ("16 A800, 15 s, 350K", 16, 350_000, 15, "a800", "1.12 to 1.48"),
        ("32 A6000, 15 s, 175K", 32, 175_000, 15, "a6000", "1.27 to 1.54"),
    ]
    return [
        Comparison(
            label=f"{label}, V{share * 100:.0f}",
            workload=f"wan:{num_ranks}:{tokens}:{share}:{seconds}",
            num_ranks=num_ranks,
            model="wan2.1-1.3b",
            hardware=device,
            shard_size=8,
            planners=(*map(str, compared_planners(num_ranks)), MIXED_BAGS[num_ranks]),
            published=None if ratio is None else {"Zellige over KnapFormer's bags": ratio},
        )
        for label, num_ranks, tokens, seconds, device, ratio in sizes
        for share in VIDEO_SHARES
    ]


def _open_sora() -> list[Comparison]:
    return [
        Comparison(
            label=f"{table}, {num_ranks} ranks",
            workload=table,
            num_ranks=num_ranks,
            model="open-sora-2.0",
            hardware="h200",
            shard_size=8,
        )
        for table in ("open-sora-2.0-stage1", "open-sora-2.0-stage2", "open-sora-1.2-stage3")
        for num_ranks in (32, 128)
    ]


PRESETS = {"knapformer": _knapformer, "zellige": _zellige, "open-sora": _open_sora}
"""By name, in the order in which help texts show them."""


def comparisons(preset: str) -> list[Comparison]:
    """The comparisons of a preset.

    Raises:
        ConfigurationError: listing the known presets.
    """
    if preset not in PRESETS:
        raise ConfigurationError(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")
    return PRESETS[preset]()


def run_comparison(
    comparison: Comparison, *, num_steps: int, seed: int = 0, on_step: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Draw steps and simulate every planner on them.

    Returns:
        The comparison, ``planners`` with ``simulate``'s rows, and ``ratios``: what the published figures are about.
    """
    steps_of = drawn_from(comparison.workload, comparison.num_ranks, seed)
    first = steps_of()
    check_drawn(num_steps, first.num_sequences, "fewer --steps")
    steps = [first, *(steps_of() for _ in range(num_steps - 1))]
    shape, device = model_shape(comparison.model), hardware(comparison.hardware)
    memory = MemoryModel.of_model(comparison.model, shape, shard_size=comparison.shard_size)
    setting = setting_of(device.cost(shape), device, memory, num_ranks=comparison.num_ranks)
    specs = planners_of(comparison)
    rows = simulate(steps, specs, setting, on_step=on_step)
    own = find_workload(comparison.workload).model
    return {
        **asdict(comparison),
        "model_chosen": "the preset's" if own != comparison.model else BY_WORKLOAD,
        "workload_model": own,
        "speeds": f"assumed speeds of {device.name}",
        "memory_of": f"{device.name} (the preset's)",
        "steps": num_steps,
        "seed": seed,
        "planners": rows,
        "ratios": ratios(rows),
    }


def planners_of(comparison: Comparison) -> list[PlannerSpec]:
    """The planners to compare, parsed."""
    return [PlannerSpec.parse(name) for name in comparison.planners] or compared_planners(comparison.num_ranks)


def ratios(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Speed-ups of and over the best fixed bags, and traffic over that of splitting every sequence over all ranks."""
    found: dict[str, float] = {}
    best, moldable = best_bags(rows), rows.get("moldable", {})
    reference = next((row["reference"] for row in rows.values() if "reference" in row), "")
    if best is not None and best != reference:
        found[f"best bags over {reference}"] = rows[best]["speedup"]
    if "speedup" in moldable and reference != "moldable":
        found[f"moldable over {reference}"] = moldable["speedup"]
    if "speedup" in moldable and best is not None:
        found["moldable over best bags"] = moldable["speedup"] / rows[best]["speedup"]
    one_bag = [row["exchanged_gigabytes"] for name, row in rows.items() if name.endswith("n1") and "+" not in name]
    everything = max(one_bag, default=0.0)
    if everything:
        for name, row in (("best bags", rows.get(best or "", {})), ("moldable", moldable)):
            if "exchanged_gigabytes" in row:
                found[f"traffic of {name} over splitting everything"] = row["exchanged_gigabytes"] / everything
    return found


def ratio_lines(found: Mapping[str, float]) -> Iterator[str]:
    """``ratios`` in words."""
    for name, value in found.items():
        what, _, other = name.partition(" over ")
        if what.startswith("traffic of "):
            yield f"{what.removeprefix('traffic of ')} sends {value:.2f} × what {other} does"
        else:
            yield f"{what} {'are' if what == 'best bags' else 'is'} {than(value, other)}"
