"""KnapFormer: straggler-free training of Diffusion Transformers on mixed image resolutions and video.

The names below come from pure modules, except ``Balancer``, ``BalancedBatchSampler``, ``Step``, ``Meter`` and
``SequenceBalancer`` (the published package's interface), which load torch when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from knapformer.errors import (
    CapacityError,
    ConfigurationError,
    DisagreementError,
    KnapFormerError,
    LengthsError,
    PlanError,
    RankError,
)
from knapformer.given.cost import CostModel, Machine
from knapformer.given.lengths import Lengths
from knapformer.given.topology import Topology
from knapformer.plans.plan import Plan
from knapformer.plans.planners import Evaluation, evaluate, make_plan
from knapformer.version import __version__

if TYPE_CHECKING:
    from knapformer.adapters.published import SequenceBalancer
    from knapformer.balancer import Balancer
    from knapformer.execution.transport import Meter
    from knapformer.step import Step
    from knapformer.training.sampler import BalancedBatchSampler

__all__ = [
    "BalancedBatchSampler",
    "Balancer",
    "CapacityError",
    "ConfigurationError",
    "CostModel",
    "DisagreementError",
    "Evaluation",
    "KnapFormerError",
    "Lengths",
    "LengthsError",
    "Machine",
    "Meter",
    "Plan",
    "PlanError",
    "RankError",
    "SequenceBalancer",
    "Step",
    "Topology",
    "__version__",
    "evaluate",
    "make_plan",
]


def __getattr__(name: str) -> Any:
    if name == "Balancer":
        from knapformer.balancer import Balancer

        return Balancer
    if name == "BalancedBatchSampler":
        from knapformer.training.sampler import BalancedBatchSampler

        return BalancedBatchSampler
    if name == "Step":
        from knapformer.step import Step

        return Step
    if name == "Meter":
        from knapformer.execution.transport import Meter

        return Meter
    if name == "SequenceBalancer":
        from knapformer.adapters.published import SequenceBalancer

        return SequenceBalancer
    raise AttributeError(f"module 'knapformer' has no attribute {name!r}")
