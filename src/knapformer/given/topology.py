"""Ranks, nodes and bags: where the ranks of a balancing group sit, and KnapFormer's fixed groups of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby

from knapformer.errors import ConfigurationError
from knapformer.given.lengths import MAX_RANKS

MAX_DIGITS = 7
_BAG = re.compile(r"g(\d+)n(\d+)")


@dataclass(frozen=True, slots=True)
class Topology:
    """Bags over consecutive ranks, and the ranks of each node.

    ``g1n2+g2n1+g4n1`` is two bags of one rank, one of two and one of four: 8 ranks. Bags lie over consecutive
    ranks in ascending size. In a world that is a multiple of the bags' total, the bags repeat in independent
    balancing groups.

    Attributes:
        bag_sizes: ranks of each bag, ascending; empty where no bags are wanted.
        ranks_per_node: ranks with fast links among them; None leaves it to the cost model's machine.
    """

    bag_sizes: tuple[int, ...] = ()
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.bag_sizes):
            raise ConfigurationError(f"a bag needs at least one rank, got bags of {list(self.bag_sizes)}")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigurationError(f"a node needs at least one rank, got ranks_per_node={self.ranks_per_node}")
        object.__setattr__(self, "bag_sizes", tuple(sorted(self.bag_sizes)))

    @classmethod
    def parse(cls, spec: str, ranks_per_node: int | None = None) -> Topology:
        """Read ``g{ranks}n{bags}`` terms joined by ``+``; a size may be repeated.

        Raises:
            ConfigurationError: the spec is not of that form.
        """
        sizes: list[int] = []
        for term in spec.replace(" ", "").split("+"):
            match = _BAG.fullmatch(term)
            if match is None or "0" in (match[1].lstrip("0") or "0", match[2].lstrip("0") or "0"):
                raise ConfigurationError(
                    f"topology {spec!r}: {term!r} is not of the form g{{ranks per bag}}n{{number of bags}}, "
                    "as in g1n2+g2n1"
                )
            if max(len(match[1]), len(match[2])) > MAX_DIGITS or len(sizes) + int(match[2]) > MAX_RANKS:
                raise ConfigurationError(f"topology {spec[:40]!r}: more than {MAX_RANKS} bags or ranks in one")
            sizes += [int(match[1])] * int(match[2])
        return cls(tuple(sizes), ranks_per_node)

    @classmethod
    def uniform(cls, bag_size: int, num_ranks: int) -> Topology:
        """``num_ranks / bag_size`` bags of ``bag_size`` ranks each."""
        if bag_size < 1 or num_ranks % bag_size:
            raise ConfigurationError(f"{num_ranks} ranks cannot be cut into bags of {bag_size}")
        return cls((bag_size,) * (num_ranks // bag_size))

    @property
    def num_ranks(self) -> int:
        """Ranks of one balancing group: the bags' total."""
        return sum(self.bag_sizes)

    def num_groups(self, world_size: int) -> int:
        """How many independent balancing groups a world of ``world_size`` ranks holds.

        Raises:
            ConfigurationError: there are no bags, or the world is not a multiple of their total.
        """
        if not self.bag_sizes:
            raise ConfigurationError("this planner needs bags: give a topology such as g1n2+g2n1")
        if world_size < 1 or world_size % self.num_ranks:
            raise ConfigurationError(
                f"a world of {world_size} ranks is not a multiple of the {self.num_ranks} ranks of topology {self}"
            )
        return world_size // self.num_ranks

    def __str__(self) -> str:
        return "+".join(f"g{size}n{len(list(bags))}" for size, bags in groupby(self.bag_sizes))


def uniform_topologies(num_ranks: int) -> list[Topology]:
    """Every uniform layout ``g{2^k}n{N / 2^k}`` of ``num_ranks`` ranks, smallest bags first."""
    sizes = [1 << k for k in range(num_ranks.bit_length()) if num_ranks % (1 << k) == 0]
    return [Topology.uniform(size, num_ranks) for size in sizes]
