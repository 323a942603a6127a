"""A planner by its name on a command line or in a results file, with the layout that ``bags`` need."""

from __future__ import annotations

from dataclasses import dataclass

from knapformer.errors import ConfigurationError
from knapformer.given.topology import Topology
from knapformer.plans.planners import PLANNERS


@dataclass(frozen=True, slots=True)
class PlannerSpec:
    """A planner and, for ``bags``, its layout: ``moldable``, ``bags:g1n2+g2n1``."""

    name: str
    topology: str | None = None

    @classmethod
    def parse(cls, text: str) -> PlannerSpec:
        """Read ``NAME`` or ``bags:SPEC``.

        Raises:
            ConfigurationError: an unknown planner, or bags without or others with a layout.
        """
        name, _, layout = text.strip().partition(":")
        if name not in PLANNERS:
            raise ConfigurationError(f"unknown planner {name!r}; known: {', '.join(PLANNERS)}, bags as bags:g2n1")
        if (name == "bags") != bool(layout):
            raise ConfigurationError(f"bags need a layout and other planners have none, as in bags:g2n1; got {text!r}")
        return cls(name, str(Topology.parse(layout)) if layout else None)

    def __str__(self) -> str:
        return self.name if self.topology is None else f"{self.name}:{self.topology}"
