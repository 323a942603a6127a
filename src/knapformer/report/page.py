"""A training comparison as one self-contained HTML page, made from its results file alone."""

from __future__ import annotations

import base64
import gzip
import html
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from knapformer.demo.results import COLUMNS, SCHEMA, loss_curve, step_times
from knapformer.errors import ConfigurationError

_GREY, _INK, _RULE, _RED = "#8c939b", "#1c2733", "#e3e7eb", "#c0392b"
_BAGS = ("#9ec5f4", "#4a8fe0", "#1f5fb0", "#143d73")
_OTHERS = ("#d0862a", "#a4579c", "#6b6f1d")
_MOLDABLE = "#0a8f62"

_LAYOUT: dict[str, Any] = {
    "template": "none",
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": _INK},
    "margin": {"l": 60, "r": 24, "t": 12, "b": 48},
    "height": 340,
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    "xaxis": {"showgrid": False, "linecolor": _RULE, "zeroline": False},
    "yaxis": {"gridcolor": _RULE, "zeroline": False, "rangemode": "tozero"},
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; max-width: 1080px; margin: 32px auto; padding: 0 20px }
h1 { font-size: 26px; margin: 0 0 4px } h2 { font-size: 17px; margin: 28px 0 0 } p { margin: 4px 0 12px }
.muted { color: #5b6670; font-size: 13px } .figures { display: grid; grid-template-columns: 1fr 1fr; gap: 0 28px }
@media (max-width: 860px) { .figures { grid-template-columns: 1fr } }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; margin-top: 16px }
th { text-align: right; font-weight: 600; border-bottom: 2px solid #c9d0d6; padding: 5px 8px; vertical-align: bottom }
td { text-align: right; border-bottom: 1px solid #e3e7eb; padding: 5px 8px }
th:first-child, td:first-child { text-align: left } tr.best td { font-weight: 600; background: #eef8f3 }
"""

_SCRIPT = """
const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent), c => c.charCodeAt(0));
const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
new Response(unpacked).text().then(code => {
  const script = document.createElement("script");
  script.textContent = code;
  document.head.append(script);
  const figures = JSON.parse(document.getElementById("figures").textContent);
  for (const [id, figure] of Object.entries(figures))
    Plotly.newPlot(id, figure.data, figure.layout, {displayModeBar: false, responsive: true});
});
"""


def render_page(result: Mapping[str, Any]) -> str:
    """The page of a results file's content.

    Raises:
        ConfigurationError: another schema, or plotly is not installed.
    """
    if result.get("schema") != SCHEMA:
        raise ConfigurationError(f"expected a results file with schema {SCHEMA!r}, got {result.get('schema')!r}")
    figures = {
        "load": load_figure(result),
        "steps": steps_figure(result),
        "time": time_figure(result),
        "loss": loss_figure(result),
    }
    titles = {
        "load": (
            "Load of each rank",
            "Busy seconds in a step, waiting excluded; medians. The bound shares home's evenly.",
        ),
        "steps": ("Step time", _steps_caption(result)),
        "time": ("Where the time goes", "Mean over ranks. Exchanges include waiting for the other ranks in them."),
        "loss": ("Loss", _loss_caption(result)),
    }
    figures_json = json.dumps(figures).replace("</", "<\\/")
    sections = "".join(
        f'<section><h2>{title}</h2><p class="muted">{html.escape(caption)}</p><div id="{name}"></div></section>'
        for name, (title, caption) in titles.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>KnapFormer: {html.escape(_headline(result))}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{html.escape(_headline(result))}</h1><p class="muted">{html.escape(_subtitle(result))}</p>'
        f'{_table(result["summary"])}<div class="figures">{sections}</div>'
        f'<script type="application/json" id="figures">{figures_json}</script>'
        f'<script type="text/plain" id="plotly">{_packed_plotly()}</script><script>{_SCRIPT}</script></body></html>\n'
    )


def load_figure(result: Mapping[str, Any]) -> dict[str, Any]:
    """Bars of each rank's busy time under every planner, and a line where sharing all work evenly would put it."""
    warmup, planners = result["config"]["warmup_steps"], result["planners"]
    colors = _colors(list(planners))
    ranks = [f"rank {rank}" for rank in range(result["num_ranks"])]
    marker = {"symbol": "diamond-open", "size": 8, "color": _INK}
    shown = {"mode": "markers", "marker": marker, "showlegend": False}
    bars, predictions = [], []
    for name, notes in planners.items():
        busy = [_median(own[warmup:]) for own in notes["busy_s"]]
        predicted = [_median(own[warmup:]) for own in notes["predicted_busy_s"]]
        group = {"x": ranks, "offsetgroup": name}
        bars.append({"type": "bar", "name": name, "y": busy, "marker": {"color": colors[name]}, **group})
        predictions.append({"type": "scatter", "name": f"{name} predicted", "y": predicted, **shown, **group})
    even = statistics.fmean(busy_s or 0.0 for busy_s in bars[0]["y"])
    line = {"color": _RED, "width": 2, "dash": "dash"}
    shape = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": even, "y1": even, "line": line}
    nowhere = {"type": "scatter", "x": [None], "y": [None]}
    legend = [
        {**nowhere, "name": "cost model", **shown, "showlegend": True},
        {**nowhere, "name": "lower bound", "mode": "lines", "line": line},
    ]
    layout = _layout("busy, s", barmode="group", scattermode="group", shapes=[shape])
    return {"data": [*bars, *predictions, *legend], "layout": layout}


def steps_figure(result: Mapping[str, Any]) -> dict[str, Any]:
    """A box of step times for each planner, its steps beside it."""
    warmup, planners = result["config"]["warmup_steps"], result["planners"]
    colors = _colors(list(planners))
    boxes = [
        {
            "type": "box",
            "name": name,
            "y": [s for s in step_times(notes)[warmup:] if s is not None],
            "boxpoints": "all",
            "pointpos": 0,
            "jitter": 0.5,
            "marker": {"size": 4, "opacity": 0.6},
            "line": {"color": colors[name], "width": 2},
            "showlegend": False,
        }
        for name, notes in planners.items()
    ]
    layout = _layout("step, s")
    if _steps_off_scale(result):
        layout["yaxis"] = {**layout["yaxis"], "range": [0, _step_scale_s(result)]}
    return {"data": boxes, "layout": layout}


def _step_scale_s(result: Mapping[str, Any]) -> float:
    """Twice the slowest planner's median: a step that the machine held up must not flatten all others."""
    limit_s: float = 2 * max(row["step_s"] for row in result["summary"].values())
    return limit_s


def _steps_off_scale(result: Mapping[str, Any]) -> int:
    warmup = result["config"]["warmup_steps"]
    times = [s for notes in result["planners"].values() for s in step_times(notes)[warmup:]]
    return sum(s is not None and s > _step_scale_s(result) for s in times)


def time_figure(result: Mapping[str, Any]) -> dict[str, Any]:
    """Computing, exchanging and waiting elsewhere (FSDP's collectives, chiefly) in the median step of each planner."""
    warmup, planners = result["config"]["warmup_steps"], result["planners"]
    parts: dict[str, list[float]] = {"computing": [], "in exchanges": [], "waiting elsewhere": []}
    for name, notes in planners.items():
        busy, exchange = (
            statistics.fmean(_median(own[warmup:]) or 0.0 for own in notes[measure])
            for measure in ("busy_s", "exchange_s")
        )
        rest = max(0.0, result["summary"][name]["step_s"] - busy - exchange)
        for part, seconds in zip(parts.values(), (busy, exchange, rest), strict=True):
            part.append(seconds)
    bars = [
        {"type": "bar", "name": part, "x": list(planners), "y": seconds, "marker": {"color": color}, "width": 0.6}
        for (part, seconds), color in zip(parts.items(), ("#4a8fe0", "#d0862a", "#d5dade"), strict=True)
    ]
    return {"data": bars, "layout": _layout("step, s", barmode="stack")}


def loss_figure(result: Mapping[str, Any]) -> dict[str, Any]:
    """Loss curves; the first planner's is wide, so that the others show on top of it."""
    planners = result["planners"]
    colors = _colors(list(planners))
    lines = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": list(range(1, len(loss_curve(notes)) + 1)),
            "y": loss_curve(notes),
            "line": {"color": colors[name], "width": 2 if at else 8, "dash": "dot" if at else "solid"},
            "opacity": 1.0 if at else 0.45,
        }
        for at, (name, notes) in enumerate(planners.items())
    ]
    layout = _layout("flow-matching loss")
    layout["xaxis"] = {**layout["xaxis"], "title": _title("step")}
    layout["yaxis"] = {**layout["yaxis"], "rangemode": "normal"}
    return {"data": lines, "layout": layout}


def _layout(y_title: str, **more: Any) -> dict[str, Any]:
    return {**_LAYOUT, "yaxis": {**_LAYOUT["yaxis"], "title": _title(y_title)}, **more}


def _title(text: str) -> dict[str, Any]:
    return {"text": text, "font": {"size": 13}}


def _colors(names: Sequence[str]) -> dict[str, str]:
    bags, others, colors = iter(_BAGS * len(names)), iter(_OTHERS * len(names)), {}
    for name in names:
        if name == "home":
            colors[name] = _GREY
        elif name == "moldable":
            colors[name] = _MOLDABLE
        else:
            colors[name] = next(bags if name.startswith("bags") else others)
    return colors


def _median(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def _best(summary: Mapping[str, Mapping[str, float]]) -> str:
    return max(summary, key=lambda name: summary[name]["speedup"])


def _headline(result: Mapping[str, Any]) -> str:
    summary = result["summary"]
    reference, best = next(iter(summary)), _best(summary)
    if best == reference:
        return f"No planner is faster than {reference} here"
    return f"{best} trains {summary[best]['speedup']:.2f} × as fast as {reference}"


def _subtitle(result: Mapping[str, Any]) -> str:
    config, place = result["config"], result["environment"]
    ideal = next(iter(result["summary"].values()))["ideal_speedup"]
    return (
        f"Perfect balance would give {ideal:.2f} ×. {result['num_ranks']} ranks on {place['device']}, "
        f"torch {place['torch']}, {config['dtype']}; workload {config['codes']}; "
        f"{config['steps']} steps of each planner, in turn on the same data; {result['created']}."
    )


def _steps_caption(result: Mapping[str, Any]) -> str:
    count = _steps_off_scale(result)
    beyond = f" {count} held-up step{'s' if count > 1 else ''} off the scale." if count else ""
    return "Every timed step; the line in each box is the median." + beyond


def _loss_caption(result: Mapping[str, Any]) -> str:
    largest = max(row["loss_difference"] for row in result["summary"].values())
    return f"The curves lie on one another: the largest relative difference at any step is {largest:.1e}."


def _table(summary: Mapping[str, Mapping[str, float]]) -> str:
    head = "".join(f"<th>{title}</th>" for title in ("planner", *(column.title for column in COLUMNS)))
    body = "".join(
        f"<tr{' class=best' if name == _best(summary) else ''}><td>{html.escape(name)}</td>"
        + "".join(f"<td>{column.text(row)}</td>" for column in COLUMNS)
        + "</tr>"
        for name, row in summary.items()
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _packed_plotly() -> str:
    """Plotly's own script, compressed: a third of its size; the page unpacks it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigurationError("pages need plotly: pip install 'knapformer[demo]'") from None
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
