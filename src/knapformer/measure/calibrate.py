"""Fit the cost model to this machine: time packs of sequences through the model's forward and backward passes.

All ranks time the same packs at the same moment, as they would train, because they may share caches, memory bandwidth
and power. What every rank then uses is one fit to the medians over ranks and repeats.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from knapformer.balancer import Balancer
from knapformer.errors import ConfigurationError
from knapformer.execution.groups import BalancingGroup, gather_values, wait_for_all
from knapformer.execution.transport import Meter
from knapformer.given.cost import CostModel, Fit, PackSample, fit

Pack = tuple[int, ...]

LINK_PROBES = 5
LINK_PROBE_BYTES = 4_000_000


@dataclass(frozen=True, slots=True)
class Calibration:
    """A cost model and how well it predicts packs that it was not fitted to.

    Attributes:
        cost: with this machine's speed, γ and link.
        fit: of the whole model's forward and backward pass.
        held_out_mape: mean absolute error, as a fraction, on packs that were kept out of the fit.
        samples, held_out: what was measured.
        seconds: what calibrating took.
    """

    cost: CostModel
    fit: Fit
    held_out_mape: float
    samples: tuple[PackSample, ...]
    held_out: tuple[PackSample, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For a results file; ``cost`` alone is the content of a cost file."""
        return asdict(self)


def default_packs(longest_tokens: int) -> tuple[list[Pack], list[Pack]]:
    """Packs to fit and packs to test, from one sequence of ``longest_tokens`` down to many short ones.

    Raises:
        ConfigurationError: the longest is too short to tell the terms apart.
    """
    if longest_tokens < 64:
        raise ConfigurationError(f"calibration needs sequences of 64 tokens at least, got {longest_tokens}")

    def pack(*shares: float) -> Pack:
        return tuple(max(1, round(share * longest_tokens)) for share in shares)

    fitted = [
        pack(1.0),
        pack(0.6),
        pack(0.35),
        pack(0.2, 0.2),
        pack(0.1),
        pack(*[0.05] * 6),
        pack(*[0.03] * 3),
        pack(0.4, *[0.04] * 5),
    ]
    return fitted, [pack(0.8), pack(0.3, 0.15), pack(*[0.06] * 4), pack(0.5, 0.05, 0.05)]


def calibrate(
    run_pack: Callable[[Pack], None],
    template: CostModel,
    group: BalancingGroup,
    *,
    packs: tuple[Sequence[Pack], Sequence[Pack]],
    repeats: int = 2,
    on_pack: Callable[[], None] = lambda: None,
) -> Calibration:
    """Time packs and fit the cost model. Every rank of ``group`` calls it and gets the same result.

    Args:
        run_pack: one forward and backward pass over a pack, without waiting for the device.
        template: gives FLOPs, layers and pass factor.
        group: the ranks that measure together.
        packs: those to fit and those to test.
        repeats: measurements of each pack.
        on_pack: called after each measurement.
    """
    began = time.perf_counter()
    fitted, tested = packs
    run_pack(min(fitted, key=sum))
    own: list[list[float]] = [[] for _ in (*fitted, *tested)]
    for _ in range(repeats):
        for times, pack in zip(own, (*fitted, *tested), strict=True):
            times.append(time_pack(run_pack, pack, group))
            on_pack()
    everyones = gather_values(group, own)
    seconds = [statistics.median(t for times in pack for t in times) for pack in zip(*everyones, strict=True)]
    samples = [PackSample(pack, s) for pack, s in zip((*fitted, *tested), seconds, strict=True)]
    training, held_out = samples[: len(fitted)], samples[len(fitted) :]
    found = fit(training)
    cost = found.to_cost(template, template.num_layers * template.pass_factor)
    bandwidth = measure_link(template, group)
    if bandwidth:
        cost = cost.with_machine(intra_node_bytes_per_s=bandwidth, inter_node_bytes_per_s=bandwidth)
    return Calibration(
        cost, found, found.mape_on(held_out), tuple(training), tuple(held_out), time.perf_counter() - began
    )


def time_pack(run_pack: Callable[[Pack], None], pack: Pack, group: BalancingGroup) -> float:
    """Seconds of one pass, begun by all ranks together.

    By device events on CUDA. On a CPU by this thread's CPU time where it computes alone, so that other programs on the
    machine matter little, and by the clock where it has helpers.
    """
    wait_for_all(group)
    if group.device.type != "cuda":
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        began = clock()
        run_pack(pack)
        return clock() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run_pack(pack)
    last.record()
    last.synchronize()
    return 1e-3 * float(first.elapsed_time(last))


def measure_link(template: CostModel, group: BalancingGroup) -> float:
    """Bytes per second and direction that a rank's exchange reaches, its copies included; 0 for a single rank.

    Every rank of ``group`` calls it. The route of sequences that are split over all ranks is timed, so on several nodes
    this is the slower link's figure.
    """
    if group.size == 1:
        return 0.0
    meter = Meter()
    balancer = Balancer(template, planner="ulysses", group=group.data, meter=meter)
    rows = max(group.size, LINK_PROBE_BYTES // (template.hidden * 4))
    step = balancer.prepare([rows])
    x: Tensor = torch.ones(rows, template.hidden, dtype=torch.float32, device=group.device)
    rates = []
    for _ in range(LINK_PROBES):
        wait_for_all(group)
        meter.clear()
        began = time.perf_counter()
        step.route(x)
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        rates.append(meter.bytes_sent / (time.perf_counter() - began))
    rate: float = statistics.median(r for ranks in gather_values(group, rates) for r in ranks)
    return rate
