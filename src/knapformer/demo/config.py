"""What a training comparison runs: planners, workload, model and training options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from knapformer.errors import ConfigurationError
from knapformer.given.shapes import DEMO_HEAD_WIDTH, DEMO_HEADS
from knapformer.given.topology import Topology, uniform_topologies
from knapformer.plans.registry import PlannerSpec
from knapformer.workloads.codes import parse_codes

DEMO_CODES = "g1b1i672f4s0,g1b8i128f1s0"
"""One video of 7056 visual tokens, then eight images of 64: the video alone outweighs the mean of the two ranks."""

DEMO_STEPS = 20

MOST_BENCH_RANKS = 65_536
MOST_BENCH_STEPS = 1_000_000
MOST_TEXT_TOKENS = 4096
MOST_WIDTH, MOST_BLOCKS = 16_384, 256
MOST_LEARNING_RATE = 1e3

DTYPES = ("float32", "float64", "bfloat16")
CHECKPOINTS = ("none", "block", "attention")


def default_planners(num_ranks: int) -> tuple[PlannerSpec, ...]:
    """``home``, the uniform layouts of bags of two ranks and more, and ``moldable``.

    Bags of one rank are left out: they move whole sequences, and the demo has one that is heavier than the mean load.
    """
    layouts = [t for t in uniform_topologies(num_ranks) if t.bag_sizes[0] > 1] or [
        Topology.uniform(num_ranks, num_ranks)
    ]
    bags = (PlannerSpec("bags", str(layout)) for layout in layouts)
    return (PlannerSpec("home"), *bags, PlannerSpec("moldable"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One comparison of planners. The first one is what the others are compared with.

    Attributes:
        codes: workload in KnapFormer's data codes; ranks beyond their number take them over again.
        planners: what to compare.
        num_heads, head_width, num_double_blocks, num_single_blocks: the MMDiT.
        steps: of each planner.
        warmup_steps: first steps, left out of all times but not out of the loss curves.
        dtype: of parameters and tokens; bfloat16 keeps float32 parameters and computes in bfloat16.
        checkpoint: what is recomputed in backward.
        shard_size: ranks over which FSDP2 shards a copy of the parameters; None means all.
        reshard_after_forward: free a block's gathered parameters between its forward and its backward pass.
        learning_rate: of AdamW.
        max_text_tokens: longer captions are cut.
        seed: of samples and initial parameters.
        cost: content of a cost file; None calibrates first.
        overlap: compute whole sequences' attention while the others' exchange is under way.
        max_tokens_per_rank: cap for the planners; see ``make_plan``.
    """

    codes: str = DEMO_CODES
    planners: tuple[PlannerSpec, ...]
    num_heads: int = DEMO_HEADS
    head_width: int = DEMO_HEAD_WIDTH
    num_double_blocks: int = 1
    num_single_blocks: int = 1
    steps: int = DEMO_STEPS
    warmup_steps: int = 2
    dtype: str = "float32"
    checkpoint: str = "none"
    shard_size: int | None = None
    reshard_after_forward: bool = True
    learning_rate: float = 1e-3
    max_text_tokens: int = 48
    seed: int = 0
    cost: Mapping[str, Any] | None = field(default=None)
    overlap: bool = True
    max_tokens_per_rank: int | str | None = "auto"

    def __post_init__(self) -> None:
        codes = parse_codes(self.codes)
        num_ranks, num_samples = sum(c.num_ranks for c in codes), sum(c.num_ranks * c.batch_size for c in codes)
        if max(num_ranks, num_samples) > MOST_BENCH_RANKS:
            raise ConfigurationError(
                f"codes must mean {MOST_BENCH_RANKS:,} ranks and samples at most, got {num_ranks:,} and {num_samples:,}"
            )
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.checkpoint not in CHECKPOINTS:
            raise ConfigurationError(f"checkpoint must be one of {', '.join(CHECKPOINTS)}, got {self.checkpoint!r}")
        if not 0 <= self.warmup_steps < self.steps:
            raise ConfigurationError(
                f"warm-up steps must be fewer than steps, got {self.warmup_steps} of {self.steps} steps"
            )
        for name, value, most in (
            ("steps", self.steps, MOST_BENCH_STEPS),
            ("text tokens", self.max_text_tokens, MOST_TEXT_TOKENS),
            ("heads", self.num_heads, MOST_WIDTH),
            ("channels of a head", self.head_width, MOST_WIDTH),
            ("channels of all heads", self.num_heads * self.head_width, MOST_WIDTH),
            ("blocks", self.num_double_blocks + self.num_single_blocks, MOST_BLOCKS),
        ):
            if not 1 <= value <= most:
                raise ConfigurationError(f"{name} must be 1 to {most:,}, got {value:,}")
        if min(self.num_double_blocks, self.num_single_blocks) < 0:
            raise ConfigurationError(
                f"blocks must be 0 or more, got {self.num_double_blocks} double, {self.num_single_blocks} single ones"
            )
        if not 0 < self.learning_rate <= MOST_LEARNING_RATE:
            raise ConfigurationError(
                f"the learning rate must be above 0, {MOST_LEARNING_RATE:g} at most, got {self.learning_rate}"
            )
        if not self.planners or len(set(self.planners)) < len(self.planners):
            raise ConfigurationError(f"planners must be given once each, got {', '.join(map(str, self.planners))}")

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ``ConfigurationError`` unless bags and shards fit that many ranks."""
        for planner in self.planners:
            if planner.topology is not None:
                Topology.parse(planner.topology).num_groups(num_ranks)
        if self.shard_size is not None and (self.shard_size < 1 or num_ranks % self.shard_size):
            raise ConfigurationError(f"shards of {self.shard_size} ranks do not divide {num_ranks} ranks")

    def to_dict(self) -> dict[str, Any]:
        """For a results file."""
        return {**asdict(self), "planners": [str(planner) for planner in self.planners]}
