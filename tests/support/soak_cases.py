"""Random cases of a balanced step: every choice follows from one number, the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from knapformer.plans.planners import PLANNERS

MAX_RANKS = 8

PRECISIONS = {"float64": 8, "float32": 4, "bfloat16": 3, "float16": 2, "autocast": 3}
"""How often each is drawn. ``autocast`` has parameters in float32 and computes in bfloat16."""

PLANS = (*(p.name for p in PLANNERS.values() if p.package is None), *["random"] * 4, "apart")
"""Planners that need no further package, plans that put anything anywhere, and tokens apart from heads."""

ORDERS = ("in turn", "in turn", "alive", "alive, last first", "one loss", "interleaved", "micro-batches")
"""What becomes of several steps: forward and backward one after another; all forward passes before the backward passes,
in either order; one backward pass for all; forward passes that take turns block by block; dealt out anew."""

SHAPES = {"short": 10, "tiny": 3, "mixed": 6, "many": 2, "long": 1, "nothing": 1}

Rows = tuple[int, int, int]
"""Text tokens, visual tokens and context rows of one sequence."""


@dataclass(frozen=True, kw_only=True)
class SoakCase:
    """One comparison of a balanced run with the unbalanced one.

    Attributes:
        world_size: ranks.
        num_blocks: of a DiT, or double and single blocks of an MMDiT.
        plan_heads, plan_kv_heads: those that the plan is made for; the model's, or others.
        planner: one of ``PLANS``.
        topology: bags; where they are fewer than the ranks, several groups balance on their own.
        frozen: which inputs need no gradients.
        frozen_parameters: the share of parameters that need none.
        before: what is done with the first step before it trains: a pass under ``no_grad`` or ``inference_mode``, or a
            validation step of its own.
        strided: inputs are not contiguous.
        steps: for each step, for each rank, its sequences.
        lanes: of the plan; a model's blocks take turns between two.
        wrong: a fault for the negative controls.
    """

    seed: int
    world_size: int
    precision: str
    model: str
    num_blocks: tuple[int, int]
    num_heads: int
    num_kv_heads: int
    plan_heads: int
    plan_kv_heads: int
    head_width: int
    causal: bool
    scale: float | None
    planner: str
    topology: str | None
    overlap: bool
    checkpoint: str | None
    fsdp: bool
    shard_size: int | None
    order: str
    frozen: frozenset[str]
    frozen_parameters: float
    before: str
    strided: bool
    steps: tuple[tuple[tuple[Rows, ...], ...], ...]
    lanes: int = 1
    wrong: str = ""


def draw(seed: int) -> SoakCase:
    """The case of a seed; ``seed % 8 + 1`` ranks, so that cases can be run in order of ranks."""
    rng = random.Random(f"soak {seed}")
    world_size = seed % MAX_RANKS + 1
    precision = rng.choices(list(PRECISIONS), list(PRECISIONS.values()))[0]
    model = rng.choice(["dit", "mmdit"])
    shape = rng.choices(list(SHAPES), list(SHAPES.values()))[0]
    num_heads = rng.randint(1, 2 if shape == "long" else 8)
    num_kv_heads = _divisor(num_heads, rng)
    plan_heads = num_heads if rng.random() < 0.8 else rng.randint(1, 8)
    fsdp = rng.random() < 0.3
    planner = rng.choice(PLANS)
    order = rng.choice(ORDERS)
    if order == "interleaved" and (fsdp or model == "mmdit"):
        order = "alive, last first"
    num_steps = 1 if shape == "long" else rng.choice([1, 1, 2, 3] if order == "in turn" else [2, 2, 3])
    before = rng.choice(["", "", "", "no_grad", "inference_mode", "validation"])
    if before == "inference_mode" and fsdp:
        before = "no_grad"  # FSDP2 itself cannot train after a first pass in inference mode
    blocks = (1, 0) if shape == "long" else (rng.randint(0, 2), rng.randint(0, 2))
    return SoakCase(
        seed=seed,
        world_size=world_size,
        precision=precision,
        model=model,
        num_blocks=blocks if sum(blocks) else (1, 0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        plan_heads=plan_heads,
        plan_kv_heads=num_kv_heads if plan_heads == num_heads else _divisor(plan_heads, rng),
        head_width=rng.choice([6, 8, 10, 16, 32]),
        causal=rng.random() < 0.25,
        scale=rng.choice([None, None, rng.uniform(0.05, 1.0)]),
        planner=planner,
        topology=_topology(world_size, rng) if planner == "bags" or rng.random() < 0.15 else None,
        overlap=rng.random() < 0.7,
        checkpoint=rng.choice([None, None, "block", "attention"]),
        fsdp=fsdp,
        shard_size=_divisor(world_size, rng) if fsdp and rng.random() < 0.3 else None,
        order=order,
        frozen=frozenset(x for x in ("text", "visual", "conditioning", "context") if rng.random() < 0.2),
        frozen_parameters=rng.choice([0.0, 0.0, 0.5]),
        before=before,
        strided=rng.random() < 0.2,
        steps=tuple(_step(world_size, shape, model, rng) for _ in range(num_steps)),
        lanes=rng.choice([1, 1, 2]),
    )


def _divisor(number: int, rng: random.Random) -> int:
    return rng.choice([d for d in range(1, number + 1) if number % d == 0])


def _topology(world_size: int, rng: random.Random) -> str:
    """Bags of any sizes, for all ranks or for an even part of them."""
    left, bags = _divisor(world_size, rng) if rng.random() < 0.3 else world_size, []
    while left:
        bags.append(rng.randint(1, left))
        left -= bags[-1]
    return "+".join(f"g{size}n1" for size in sorted(bags))


def _step(world_size: int, shape: str, model: str, rng: random.Random) -> tuple[tuple[Rows, ...], ...]:
    """The sequences of each rank; some ranks have none."""
    ranks = []
    crowded = rng.randrange(world_size)
    for rank in range(world_size):
        count = 0 if rng.random() < 0.25 or shape == "nothing" else rng.choice([1, 1, 2, 3])
        if shape == "many" and rank == crowded:
            count = rng.randint(17, 40)
        elif shape == "long" and rank == crowded:
            count = 1
        visual = [_length("short" if shape == "long" and rank != crowded else shape, rng) for _ in range(count)]
        text = [0 if model == "dit" else rng.choice([0, 1, 3, 6, 12]) for _ in range(count)]
        ranks.append(tuple((t, v, rng.choice([0, 1, 2, 5])) for t, v in zip(text, visual, strict=True)))
    return tuple(ranks)


def _length(shape: str, rng: random.Random) -> int:
    choices = {
        "tiny": [0, 1, 1, 2],
        "short": [0, 1, 2, 9, 17, rng.randint(2, 40)],
        "mixed": [0, 1, 8, rng.randint(2, 60), rng.randint(60, 400)],
        "many": [0, 1, 2, 3, rng.randint(2, 9)],
        "long": [rng.randint(1000, 5000)],
    }
    return rng.choice(choices[shape])
