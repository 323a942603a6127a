"""What may be trusted, measured: docs/trust.md from dated files in benchmarks/.

    make trust                                       # the page, from the newest file of each kind
    python scripts/trust.py --measure precision      # benchmarks/DATE-precision.json, minutes
    python scripts/trust.py --measure disagreements  # benchmarks/DATE-disagreements.json
    python scripts/trust.py --measure faults         # benchmarks/DATE-faults.json

``make soak`` with ``--json``, ``scripts/fuzz.py`` and ``benchmarks/agreement.py`` make the other kinds. A kind without
a file has no section. Every file says which command made it, when, and on what; nothing on the page is typed by hand.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "trust.md"
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(ROOT / "tests/support"))

SCHEMA = "knapformer.trust/1"

Content = dict[str, Any]

HEAD = """# Trust

Made by `make trust` of dated files in [benchmarks/](../benchmarks); nothing here is typed by hand. Errors are
‖difference‖ / ‖reference‖ of a tensor.
"""


def newest(kind: str, folder: Path = BENCHMARKS) -> Path | None:
    """The file of a kind with the latest date in its name."""
    return max(folder.glob(f"????-??-??-{kind}.json"), default=None)


def page(folder: Path = BENCHMARKS) -> str:
    """The text of docs/trust.md."""
    parts = [HEAD]
    for kind, (title, write) in SECTIONS.items():
        file = newest(kind, folder)
        if file is not None:
            content = json.loads(file.read_text())
            parts.append(f"## {title}\n\n{write(content)}\n\n{_source(content, file)}\n")
    return "\n".join(parts)


def _source(content: Content, file: Path) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    where = f"`{content['command']}` on {content['date']}: {content['machine']}; {versions}"
    return f"{where} ([file](../benchmarks/{file.name}))."


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; numbers are cut to what can be read."""
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "–" if value is None else str(value).replace("|", "\\|").replace("\n", "<br>")


def disagreements(content: Content) -> str:
    """Rows: kind, what the user sees, seconds."""
    seen = [[kind, f"`{text}`", seconds] for kind, text, seconds in content["rows"]]
    longest = max(seconds for *_, seconds in content["rows"])
    return (
        f"{len(seen)} ways in which ranks can disagree, each tried with real ranks; {longest:.2g} s at most until all "
        "knew.\n\n" + table(["what differs", "what the user sees", "seconds"], seen)
    )


def faults(content: Content) -> str:
    """Rows: what happens on one rank, what rank 0 is told, seconds until then."""
    seen = [[what, f"`{text}`", seconds] for what, text, seconds in content["rows"]]
    return (
        f"{len(seen)} faults of one of three gloo ranks, rank 1, and the error of rank 0. The balancers' timeout is "
        "20 s where a rank is killed, and 3 s in the other rows. A rank looks for the reason up to 3 s after that.\n\n"
        + table(["what happens", "what rank 0 is told", "seconds"], seen)
    )


def inputs(content: Content) -> str:
    """Rows: dictionaries, as scripts/fuzz.py names them."""
    rows = content["rows"]
    tried = sum(row["refused"] + row["accepted"] for row in rows)
    broken = [row["what"] for row in rows if row["broken"]]
    end = f"**Broken: {', '.join(broken)}**." if broken else "None broke."
    return (
        f"{tried:,} contents, made of right ones by changes of values, places and characters. A parser refuses one "
        "with an error of ours in one line, or what it returns keeps its laws: a plan places every token and head "
        "once, numbers are finite and come back equal from a second reading. Anything else, or more than 10 s, "
        "counts as broken. "
        f"{end}\n\n"
        + table(
            ["what is read", "refused", "accepted", "in the corpus"],
            [[row["what"], row["refused"], row["accepted"], row["corpus"]] for row in rows],
        )
    )


def soak(content: Content) -> str:
    """Cases and worst errors by precision."""
    ranks = sorted(int(number) for number in content["ranks"])
    begin = (
        f"{content['cases']:,} random steps on {ranks[0]} to {ranks[-1]} ranks in {content['seconds']:.0f} s: lengths, "
        "heads, plans, checkpointing, FSDP2, frozen inputs, several steps at once, micro-batches, ragged conditioning. "
        "Outputs and all gradients of the balanced run are compared with each sample run alone, in the same precision "
        f"and in float64. {_failed(content['failures'])}"
    )
    rows = [
        [
            name,
            t["cases"],
            t["tensors"],
            t["worst_apart"],
            t["worst_error"],
            t["worst_own"] or None,
            t["worst_of_limit"],
        ]
        for name, t in content["tallies"].items()
        if t["cases"]
    ]
    columns = [
        "precision",
        "cases",
        "tensors",
        "worst: balanced from unbalanced",
        "balanced from float64",
        "unbalanced from float64",
        "share of what is allowed",
    ]
    end = (
        f"Allowed are {content['allowed']['float64']:g} from the unbalanced run in float64 and "
        f"{content['allowed']['float32']:g} in float32; in lower precision, and where a tensor in float32 is a sum "
        f"that cancels, {content['allowed']['factor']:g} times the unbalanced run's own distance from float64, and "
        "more for tensors of few elements, whose error is a matter of chance (`judge` in `tests/support/soak.py`)."
    )
    return f"{begin}\n\n{table(columns, rows)}\n\n{end}"


def _failed(failures: Sequence[Content]) -> str:
    if not failures:
        return "None failed."
    seeds = ", ".join(str(failure["seed"]) for failure in failures)
    return f"**{len(failures)} failed**; seeds for `python scripts/soak.py --replay`: {seeds}."


def precision(content: Content) -> str:
    """Rows: family, precision, tokens, ours, the original's."""
    begin = (
        "One long sequence through a small random transformer of each family. The largest error of the output and of "
        "any parameter's gradient, against float32: of the balanced model, and of diffusers' own forward in the same "
        "precision."
    )
    rows = [[r["family"], r["precision"], r["num_tokens"], r["ours"], r["original"]] for r in content["rows"]]
    return f"{begin}\n\n{table(['family', 'precision', 'tokens', 'balanced', 'diffusers'], rows)}"


def agreement(content: Content) -> str:
    """Rows: dictionaries of the same keys, as benchmarks/agreement.py names them."""
    columns = list(content["rows"][0])
    return table(
        [name.replace("_", " ") for name in columns], [[row[name] for name in columns] for row in content["rows"]]
    )


SECTIONS: dict[str, tuple[str, Callable[[Content], str]]] = {
    "disagreements": ("Ranks that disagree", disagreements),
    "faults": ("Ranks that fail", faults),
    "inputs": ("Files and arguments from outside", inputs),
    "soak": ("Random steps", soak),
    "precision": ("Reduced precision", precision),
    "agreement": ("What agreement costs", agreement),
}


def measured(command: str, rows: Any) -> Content:
    """A file's content, with where it comes from."""
    return {
        "schema": SCHEMA,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()} CPU, gloo",
        "versions": {"Python": platform.python_version(), "torch": version("torch"), "diffusers": version("diffusers")},
        "rows": rows,
    }


def measure_precision() -> list[Content]:
    import precision_cases

    found = precision_cases.compare(tokens=(256, 1024, 4096), num_draws=3)
    return [row._asdict() for row in found]


def measure_disagreements() -> list[list[Any]]:
    """``tests/support/disagreements.py``: ``run_all()`` gives rows (kind, what the user sees, seconds)."""
    import disagreements

    return [list(row) for row in disagreements.run_all()]


def measure_faults() -> list[list[Any]]:
    """``tests/support/faults.py``: rows (what happens, what the others see, seconds)."""
    import faults as cases

    with tempfile.TemporaryDirectory() as folder:
        return [list(row) for row in cases.run_all(folder)]


MEASURES: dict[str, Callable[[], Any]] = {
    "precision": measure_precision,
    "disagreements": measure_disagreements,
    "faults": measure_faults,
}


def main(
    write: Annotated[bool, typer.Option("--write", help="Write docs/trust.md.")] = False,
    measure: Annotated[str | None, typer.Option(help=f"Measure anew: {', '.join(MEASURES)}.")] = None,
) -> None:
    """Make docs/trust.md, or measure what it needs."""
    if measure is not None:
        content = measured(f"python scripts/trust.py --measure {measure}", MEASURES[measure]())
        file = BENCHMARKS / f"{content['date']}-{measure}.json"
        file.write_text(json.dumps(content, indent=1) + "\n")
        print(file)
    if write:
        PAGE.write_text(page())
    elif measure is None:
        print(page())


if __name__ == "__main__":
    typer.run(main)
