"""What a plan is predicted to cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from knapformer import _core
from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.plans.plan import Plan
from knapformer.plans.problem import cost_of_group, make_problem

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Predicted cost of a plan; times and bytes of ONE layer's forward pass unless said otherwise.

    Attributes:
        makespan_s: the slowest meeting or lone rank. With two lanes, the slowest meeting in a lane, or the rank that
            computes longest in both.
        step_time_s: makespan × layers × pass factor.
        lower_bound_s: all work over all ranks' speeds.
        tight_bound_s: the lower bound with the communication that the sequences too heavy for one rank force; no legal
            plan of one lane is faster (csrc/bounds.cpp derives it). With two lanes it is the lower bound.
        discrepancy: largest over mean linear + attention time of a rank, less 1.
        bytes: exchanged for attention.
        moved_tokens: tokens that leave their home rank, once per step.
        num_split: sequences on more than one rank.
        num_meetings: distinct rank sets of split sequences.
        rank_linear_s, rank_attention_s, rank_communication_s: (N,) each rank's phases.
        rank_tokens: (N,) tokens that each rank holds.
    """

    makespan_s: float
    step_time_s: float
    lower_bound_s: float
    tight_bound_s: float
    discrepancy: float
    bytes: int
    moved_tokens: int
    num_split: int
    num_meetings: int
    rank_linear_s: FloatArray
    rank_attention_s: FloatArray
    rank_communication_s: FloatArray
    rank_tokens: npt.NDArray[np.int64]

    @property
    def over_lower_bound(self) -> float:
        """Makespan over the lower bound; 1 for a step without tokens."""
        return self.makespan_s / self.lower_bound_s if self.lower_bound_s else 1.0

    @property
    def rank_busy_s(self) -> FloatArray:
        """(N,) linear + attention."""
        return np.asarray(self.rank_linear_s + self.rank_attention_s)


def evaluate(plan: Plan, cost: CostModel | None = None) -> Evaluation:
    """The predicted cost of ``plan``. Key and value heads count as many as query heads, so GQA moves no more than this.

    Raises:
        ConfigurationError: the plan cuts another number of heads than the cost model has.
    """
    cost = CostModel() if cost is None else cost
    if plan.num_heads != cost.num_heads:
        raise ConfigurationError(f"the plan has {plan.num_heads} heads, the cost model {cost.num_heads}")
    cost = cost_of_group(cost, plan.group_offset, plan.world_size)
    problem = make_problem(plan.lengths, plan.homes, plan.world_size, cost)
    out = _core.evaluate(problem, plan.columns)
    busy = out["linear_s"] + out["attention_s"]
    return Evaluation(
        makespan_s=out["makespan_s"],
        step_time_s=out["makespan_s"] * cost.num_layers * cost.pass_factor,
        lower_bound_s=out["lower_bound_s"],
        tight_bound_s=out["tight_bound_s"],
        discrepancy=float(busy.max() / busy.mean() - 1.0) if busy.any() else 0.0,
        bytes=round(out["bytes"]),
        moved_tokens=out["moved_tokens"],
        num_split=out["num_split"],
        num_meetings=out["num_meetings"],
        rank_linear_s=out["linear_s"],
        rank_attention_s=out["attention_s"],
        rank_communication_s=out["communication_s"],
        rank_tokens=out["tokens"],
    )
