"""Every parser of what comes from outside: what is right, how it is read, and what must hold of what is accepted."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis
import judge_plan
import numpy as np
import pandas
from fuzz_inputs import changed_bytes, changed_json, changed_text
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from result_cases import result

from knapformer import BalancedBatchSampler, CostModel
from knapformer.cli.bench_planners import seeds_of
from knapformer.cli.common import parse_cap
from knapformer.demo.results_file import read_results
from knapformer.errors import ConfigurationError, KnapFormerError
from knapformer.given.cost_files import CostFile
from knapformer.given.lengths import MAX_LENGTH_TOKENS, Lengths, read_lengths
from knapformer.given.shapes import model_shape
from knapformer.given.topology import Topology
from knapformer.plans.plan import Plan
from knapformer.plans.registry import PlannerSpec
from knapformer.plans.text import format_plan, parse_plan
from knapformer.report.page import render_page
from knapformer.workloads.dataset import read_dataset
from knapformer.workloads.workloads import workload

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
"""``PARSER/NAME``: contents that once broke a parser, or are a kind of their own. Tests try all of them."""

MOST_ERROR = 2500
"""Characters of an error."""

LIMIT = timedelta(seconds=10)
"""For one content, whatever it is."""


@dataclass(frozen=True, eq=False)
class Parser:
    """One kind of file or text from outside.

    Attributes:
        suffix: of the file.
        contents: broken ones, as Hypothesis draws them.
        read: a file; raises a ``KnapFormerError`` of one line, or returns what it holds.
        check: asserts what must hold of what was accepted.
    """

    suffix: str
    contents: st.SearchStrategy[bytes]
    read: Callable[[Path], Any]
    check: Callable[[Any], None]


def outcome(parser: Parser, content: bytes, folder: Path) -> str:
    """``refused`` or ``accepted``; asserts that it is one of them in order."""
    file = folder / f"f{parser.suffix}"
    file.write_bytes(content)
    try:
        found = parser.read(file)
    except KnapFormerError as error:
        words = str(error)
        assert words and "\n" not in words and len(words) <= MOST_ERROR, f"{len(words)} characters: {words[:300]!r}"
        return "refused"
    parser.check(found)
    return "accepted"


class BrokenParserError(Exception):
    """A parser broke.

    Attributes:
        content: the smallest found that breaks it.
        counts: of what was refused and accepted until then.
    """

    def __init__(self, error: BaseException, content: bytes, counts: Counter[str]) -> None:
        super().__init__(f"{type(error).__name__}: {error}; by {content[:200]!r}")
        self.content, self.counts = content, counts


def fuzz(parser: Parser, folder: Path, *, max_examples: int, seed: int | None = None) -> Counter[str]:
    """How many contents were refused and accepted.

    Raises:
        BrokenParserError: an assertion failed, or the parser raised something else than our errors; the cause.
    """
    counts: Counter[str] = Counter()
    breaking: list[bytes] = []

    @settings(
        max_examples=max_examples,
        deadline=LIMIT,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        derandomize=seed is None,
        report_multiple_bugs=False,
    )
    @hypothesis.given(parser.contents)
    def try_one(content: bytes) -> None:
        try:
            counts[outcome(parser, content, folder)] += 1
        except BaseException:
            breaking.append(content)
            raise

    try:
        (try_one if seed is None else hypothesis.seed(seed)(try_one))()
    except Exception as error:
        raise BrokenParserError(error, min(breaking, key=len, default=b""), counts) from error
    return counts


def of_text(parse: Callable[[str], Any]) -> Callable[[Path], Any]:
    """Read a file as a command line gives text: no bytes that are no characters."""
    return lambda file: parse(file.read_bytes().decode("utf-8", "surrogateescape"))


# What must hold.


def check_lengths(found: Lengths) -> None:
    assert found.num_tokens == sum(map(sum, found.to_lists())) and found.tokens.min(initial=0) >= 0
    assert found.tokens.max(initial=0) <= MAX_LENGTH_TOKENS
    assert Lengths.from_ranks(found.to_lists()).to_lists() == found.to_lists()


def check_plan(found: Plan) -> None:
    content = found.to_dict()
    rows: list[list[int]] = [[] for _ in range(found.world_size)]
    for sequence in content["sequences"]:
        rows[sequence["home"]].append(sequence["length"])
    judge_plan.check(content, rows)
    assert found.rank_tokens.sum() == found.lengths.sum()
    assert Plan.from_dict(content) == found and parse_plan(format_plan(found)) == found


def check_cost(found: CostFile) -> None:
    assert CostModel.from_dict(json.loads(json.dumps(found.cost.to_dict()))) == found.cost
    with np.errstate(all="raise"):
        seconds = found.cost.work_s([1, 1000, MAX_LENGTH_TOKENS])
    assert np.isfinite(seconds).all() and (np.diff(seconds) > 0).all() and seconds[0] > 0, seconds


def check_results(found: dict[str, Any]) -> None:
    page = render_page(found)
    assert page.startswith("<!") and "<script>alert" not in page


def check_dataset(found: Any) -> None:
    assert found.dtype == np.int64 and len(found) and found.min() >= 0 and found.max() <= MAX_LENGTH_TOKENS


def check_rows(found: list[list[int]]) -> None:
    Lengths.from_ranks(found)


def check_topology(found: Topology) -> None:
    assert Topology.parse(str(found)) == found and found.num_ranks == sum(found.bag_sizes) > 0


def check_spec(found: PlannerSpec) -> None:
    assert PlannerSpec.parse(str(found)) == found


def check_seeds(found: range) -> None:
    assert 0 < len(found) <= 1000 and found.step == 1 and found.start >= 0


def check_cap(found: Any) -> None:
    assert found in ("auto", None) or 0 <= found < 10**12


LENGTHS_OF_SAMPLES = [100, 200, 50, 300, 20, 70, 300, 10]


def resumed(file: Path) -> BalancedBatchSampler:
    sampler = BalancedBatchSampler(LENGTHS_OF_SAMPLES, tokens_per_rank=300)
    try:
        state = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigurationError("no JSON: whoever loads the state says so") from error
    sampler.load_state_dict(state)
    return sampler


def check_resumed(found: BalancedBatchSampler) -> None:
    again = BalancedBatchSampler(LENGTHS_OF_SAMPLES, tokens_per_rank=300)
    again.load_state_dict(json.loads(json.dumps(found.state_dict())))
    left = list(found)
    samples = [i for batch in left for i in batch]
    assert len(set(samples)) == len(samples) <= len(LENGTHS_OF_SAMPLES) and list(again) == left


# What is right.

PLAN = {
    "schema": "knapformer.plan/1",
    "world_size": 3,
    "num_heads": 4,
    "planner": "x",
    "sequences": [
        {
            "id": 0,
            "length": 9,
            "home": 0,
            "tokens": [{"rank": 0, "start": 0, "end": 5}, {"rank": 2, "start": 5, "end": 9}],
            "heads": [
                {"rank": 1, "start": 0, "end": 4, "queries": [0, 7]},
                {"rank": 2, "start": 0, "end": 4, "queries": [7, 9]},
            ],
        },
        {
            "id": 1,
            "length": 3,
            "home": 2,
            "tokens": [{"rank": 2, "start": 0, "end": 3}],
            "heads": [{"rank": 2, "start": 0, "end": 4}],
        },
    ],
}


def right_plans() -> tuple[dict[str, Any], ...]:
    from knapformer import make_plan

    lengths = [[5000, 20], [300], []]
    cost = CostModel(hidden=96, num_heads=6)
    return (
        PLAN,
        *(make_plan(lengths, cost=cost, planner=name).to_dict() for name in ("home", "moldable")),
        make_plan(lengths, cost=cost, lanes=2).to_dict(),
    )


LENGTHS = (
    {"lengths": [[5, 300], {"text": [1], "visual": [2]}, []]},
    {"lengths": [[5, 300], [7], []]},
    {"lengths": [{"text": [1, 0], "visual": [2, 9]}, {"text": [], "visual": []}]},
)


def right_costs() -> tuple[dict[str, Any], ...]:
    measured = {
        "model": "flux.1-dev", "dtype": "float32", "recompute": False, "num_blocks": [1, 1], "reference_s": 0.5,
        "environment": {"device": "a processor"}, "fit": {"t0_s": 0.001}, "links": {"intra": {"bytes_per_s": 1e9}},
    }  # fmt: skip
    machine = {"speeds": [1.0, 0.5], "nodes": [0, 1], "latency_s": 1e-5, "interference": 0.2}
    full = CostModel(hidden=96, num_heads=6).to_dict()
    return (
        {"hidden": 96, "num_heads": 6},
        {**full, "machine": {**full["machine"], **machine}, "attention_span_tokens": 100, "num_layers": 3},
        {**CostModel.from_preset("flux.1-dev").to_dict(), "schema": "knapformer.cost/1", "measured": measured},
    )


TABLES = (
    "length\n100\n4000\n7\n",
    "width,height,frames,text_tokens\n512,512,1,77\n1280,720,85,400\n256,300,4,0\n",
    "id,Tokens \n1,5\n2,6\n",
)


def parquet_tables() -> tuple[bytes, ...]:
    found = []
    for text in TABLES:
        buffer = io.BytesIO()
        pandas.read_csv(io.StringIO(text)).to_parquet(buffer)
        found.append(buffer.getvalue())
    return tuple(found)


def right_states() -> tuple[dict[str, Any], ...]:
    sampler = BalancedBatchSampler(LENGTHS_OF_SAMPLES, tokens_per_rank=300, seed=3)
    fresh = sampler.state_dict()
    batches = iter(sampler)
    next(batches)
    first = sampler.state_dict()
    other = BalancedBatchSampler(LENGTHS_OF_SAMPLES, samples_per_rank=2, balance=True)
    other.load_state_dict(json.loads(json.dumps(first)))
    next(iter(other))
    return fresh, first, other.state_dict()


WORKLOADS = (
    "g2b4i256f1s0,g1b1i512f85s1", "lognormal:8:16", "lowres", "joint", "open-sora-2.0-stage2", "wan:8:65536:0.5:15",
    "wan-golden",
)  # fmt: skip
SPECS = ("moldable", "bags:g1n2+g2n1", "home", "bags:g8n4")

WAN, FLUX = model_shape("wan2.1-1.3b"), model_shape("flux.1-dev")

PARSERS: dict[str, Parser] = {
    "plan file": Parser(".json", changed_json(right_plans()), Plan.read, check_plan),
    "plan grid": Parser(
        ".txt",
        changed_text(tuple(format_plan(Plan.from_dict(p)) for p in right_plans())),
        of_text(parse_plan),
        check_plan,
    ),
    "lengths file": Parser(".json", changed_json(LENGTHS), read_lengths, check_lengths),
    "cost file": Parser(".json", changed_json(right_costs()), CostFile.read, check_cost),
    "results file": Parser(".json", changed_json((json.loads(json.dumps(result())),)), read_results, check_results),
    "CSV table": Parser(".csv", changed_text(TABLES), lambda file: read_dataset(file, FLUX), check_dataset),
    "TSV table": Parser(
        ".tsv",
        changed_text(tuple(table.replace(",", "\t") for table in TABLES)),
        lambda file: read_dataset(file, WAN),
        check_dataset,
    ),
    "Parquet table": Parser(
        ".parquet", changed_bytes(parquet_tables()), lambda file: read_dataset(file, FLUX), check_dataset
    ),
    "sampler state": Parser(".json", changed_json(right_states()), resumed, check_resumed),
    "data codes and workloads": Parser(".txt", changed_text(WORKLOADS), of_text(workload), check_rows),
    "planner": Parser(".txt", changed_text(SPECS), of_text(PlannerSpec.parse), check_spec),
    "topology": Parser(".txt", changed_text(("g1n2+g2n1", "g8n4", "g1n1")), of_text(Topology.parse), check_topology),
    "seeds": Parser(".txt", changed_text(("0-8", "3", "10-99")), of_text(seeds_of), check_seeds),
    "cap": Parser(".txt", changed_text(("auto", "none", "12345")), of_text(parse_cap), check_cap),
}
"""By what they read."""
