"""The one list of planners. Whatever names a planner (commands, tables, help texts, errors) reads it.

To add one, write a function from a ``Request`` to a ``Plan`` and register it:

    @register_planner("evens", summary="every sequence over all ranks")
    def evens(request: Request) -> Plan: ...

Ranks plan by themselves, so all of them must have registered the same function.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Container
from dataclasses import dataclass
from enum import Enum

from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths
from knapformer.given.topology import Topology, uniform_topologies
from knapformer.plans.plan import Plan

EFFORTS = ("fast", "default", "thorough")
"""How much a planner tries. The limits are counts of work, never time: the same plan on every rank."""

DEFAULT_EFFORT = "default"

MOST_BAG_RANKS = 64
"""Bags of more ranks are left out of comparisons: they are slower still, and take long to simulate."""


class Caps(Enum):
    """What a planner does about caps on the tokens of a rank."""

    KEEPS = "keeps them; ``auto`` is 1.5 times the mean"
    KEEPS_GIVEN = "keeps those that it is given; ``auto`` is none"
    IGNORES = "knows none; a plan that breaks one is refused"


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a planner is asked for.

    Attributes:
        lengths: of all ranks of the balancing group.
        cost: with the machine's nodes and speeds.
        caps: most tokens of each rank; empty means none.
        topology: bags, for a planner that needs them.
        num_kv_heads: of the plan.
        group_offset: world rank of local rank 0.
        lanes: 1, or 2 for a plan whose ranks take turns between two lanes. A planner may ignore it: ``make_plan`` then
            deals the sequences of its plan to two lanes.
        effort: how much to try, one of ``EFFORTS``. A planner may ignore it.
    """

    lengths: Lengths
    cost: CostModel
    caps: tuple[int, ...]
    topology: Topology
    num_kv_heads: int
    group_offset: int = 0
    lanes: int = 1
    effort: str = DEFAULT_EFFORT


@dataclass(frozen=True, slots=True, eq=False)
class Planner:
    """A planner as commands and tables know it.

    Attributes:
        name: on command lines, in plans and in results files.
        solve: pure; the same request gives the same plan on every rank.
        summary: what it does, in a few words.
        caps: what it does about caps.
        needs_bags: it is given as ``NAME:LAYOUT``, as in ``bags:g2n4``.
        is_reference: a simpler rule that others are measured against, on request.
        most_ranks: it takes too long on more.
        package: what must be installed for it.
    """

    name: str
    solve: Callable[[Request], Plan]
    summary: str
    caps: Caps = Caps.IGNORES
    needs_bags: bool = False
    is_reference: bool = False
    most_ranks: int | None = None
    package: str | None = None


PLANNERS: dict[str, Planner] = {}
"""By name, in the order in which tables show them."""


def register_planner(
    name: str,
    *,
    summary: str,
    caps: Caps = Caps.IGNORES,
    needs_bags: bool = False,
    is_reference: bool = False,
    most_ranks: int | None = None,
    package: str | None = None,
) -> Callable[[Callable[[Request], Plan]], Callable[[Request], Plan]]:
    """Add a planner under a name; the arguments are ``Planner``'s.

    Raises:
        ConfigurationError: the name is taken, or could not stand on a command line.
    """
    if name in PLANNERS:
        raise ConfigurationError(f"there is a planner {name!r} already")
    if not name.isprintable() or any(mark in name for mark in " :,") or not name:
        raise ConfigurationError(f"a planner's name has no spaces, colons or commas, got {name!r}")

    def add(solve: Callable[[Request], Plan]) -> Callable[[Request], Plan]:
        PLANNERS[name] = Planner(name, solve, summary, caps, needs_bags, is_reference, most_ranks, package)
        return solve

    return add


def find_planner(name: str) -> Planner:
    """The planner of that name.

    Raises:
        ConfigurationError: listing the known names.
    """
    if name not in PLANNERS:
        raise ConfigurationError(f"unknown planner {name!r}; known: {planner_names()}")
    return PLANNERS[name]


def check_installed(name: str) -> None:
    """Check that the package which a planner needs is there, without importing it.

    Raises:
        ConfigurationError: naming the extra that brings it.
    """
    package = find_planner(name).package
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigurationError(f"the planner {name} needs {package}: pip install 'knapformer[{name}]'")


def check_effort(effort: str) -> str:
    """``effort`` itself.

    Raises:
        ConfigurationError: not one of ``EFFORTS``.
    """
    if effort not in EFFORTS:
        raise ConfigurationError(f"effort must be one of {', '.join(EFFORTS)}, got {effort!r}")
    return effort


def planner_names() -> str:
    """All names as a person would write them, for help texts and errors."""
    return ", ".join(f"{p.name}:g2n1" if p.needs_bags else p.name for p in PLANNERS.values())


@dataclass(frozen=True, slots=True)
class PlannerSpec:
    """A planner and, for one that needs bags, its layout: ``moldable``, ``bags:g1n2+g2n1``."""

    name: str
    topology: str | None = None

    @classmethod
    def parse(cls, text: str) -> PlannerSpec:
        """Read ``NAME`` or ``NAME:LAYOUT``.

        Raises:
            ConfigurationError: an unknown planner, one whose package is missing, or bags without a layout or others
                with one.
        """
        name, _, layout = text.strip().partition(":")
        check_installed(name)
        if find_planner(name).needs_bags != bool(layout):
            raise ConfigurationError(f"bags need a layout and other planners have none, as in bags:g2n1; got {text!r}")
        return cls(name, str(Topology.parse(layout)) if layout else None)

    @property
    def keeps_caps(self) -> bool:
        """Whether the planner keeps caps that it is given."""
        return find_planner(self.name).caps is not Caps.IGNORES

    def __str__(self) -> str:
        return self.name if self.topology is None else f"{self.name}:{self.topology}"


def compared_planners(num_ranks: int, references: Container[str] = ()) -> list[PlannerSpec]:
    """What a comparison on so many ranks shows: every planner, and each layout of uniform bags.

    Args:
        num_ranks: of the balancing group.
        references: names of the simpler rules that are wanted, too.
    """
    specs = []
    for planner in PLANNERS.values():
        too_large = planner.most_ranks is not None and num_ranks > planner.most_ranks
        if too_large or (planner.is_reference and planner.name not in references):
            continue
        if planner.needs_bags:
            layouts = [t for t in uniform_topologies(num_ranks) if t.bag_sizes[0] <= MOST_BAG_RANKS]
            specs += [PlannerSpec(planner.name, str(layout)) for layout in layouts]
        else:
            specs.append(PlannerSpec(planner.name))
    return specs
