"""A results file's content with known figures, as two ranks would have left it."""

from __future__ import annotations

from typing import Any

from knapformer.demo.results import SCHEMA, summarize


def notes(step_s: float, busy: tuple[float, float], losses: list[float], *, exchange_s: float = 0.0) -> dict[str, Any]:
    """Two ranks, as many steps as losses; the first one, a warm-up, takes ten times as long."""
    count = len(losses)

    def every(first: float, second: float) -> list[list[float]]:
        return [[first] * count, [second] * count]

    return {
        "step_s": [[10 * step_s] + [step_s] * (count - 1), [10 * step_s] + [0.9 * step_s] * (count - 1)],
        "busy_s": every(*busy),
        "exchange_s": every(exchange_s, exchange_s),
        "bytes_sent": every(2_000_000 * (exchange_s > 0), 1_000_000 * (exchange_s > 0)),
        "prepare_s": every(0.001, 0.002),
        "loss": [[loss + 0.5 for loss in losses], [loss - 0.5 for loss in losses]],
        "tokens": every(300, 100),
        "predicted_busy_s": every(busy[0] * 1.1, busy[1]),
        "predicted_step_s": every(step_s, step_s),
        "lower_bound_step_s": every(0.5, 0.5),
        "num_split": every(1, 1),
    }


def result() -> dict[str, Any]:
    losses = [2.0, 1.5, 1.25, 1.0]
    raw = {
        "schema": SCHEMA,
        "created": "2026-01-01T00:00:00+00:00",
        "num_ranks": 2,
        "config": {"warmup_steps": 1, "steps": 4, "codes": "g1b1i64f4s0,g1b2i32f1s0", "dtype": "float32"},
        "environment": {"device": "A processor </script><b>", "torch": "2.13.0"},
        "calibration": None,
        "samples": [[[(20, 280)], [(10, 40), (10, 40)]]] * 4,
        "planners": {
            "home": notes(1.0, (0.9, 0.3), losses),
            "bags:g2n1": notes(0.8, (0.6, 0.6), [2.0, 1.5, 1.25, 1.0 + 1e-6], exchange_s=0.1),
            "moldable": notes(0.625, (0.62, 0.58), losses, exchange_s=0.05),
        },
    }
    return {**raw, "summary": summarize(raw)}
