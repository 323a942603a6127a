"""A training step layer by layer: routing, linear phase, exchange, attention, exchange back, and FSDP2's collectives.

Every rank has a clock. Two ranks that exchange anything do so from when both have come to it, for as long as the busier
one's link needs; a rank goes on after the last of its peers, and whole sequences' attention fills the time until then.
The closed formula of ``evaluate`` bounds the rate at which such clocks advance without overlap and FSDP2; here a step
has a beginning, an end and both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.plans.plan import Plan
from knapformer.predict.traffic import IntArray, Traffic, routing, traffic

FloatArray = npt.NDArray[np.float64]

FORWARD_PASSES, BACKWARD_PASSES = 1.0, 2.0
BEFORE_ATTENTION = 0.25
"""Share of the linear phase that comes before attention: of a block's 12·d² weights q, k and v are 3·d²."""
ROUTED_CHANNELS = 64
"""Of a patch of latents in FLUX (2 · 2 · 16), Wan, HunyuanVideo and Qwen-Image: the adapters route what the model is
given, and its output. A text token has more (4096 in FLUX), but there are few of them."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """FSDP2 in one balancing group: consecutive ranks share the parameters, groups of them hold copies.

    Attributes:
        shard_size: ranks over which parameters are sharded.
        gather_s: all-gather of one layer's parameters.
        reduce_s: reduce-scatter of one layer's gradients, and what the copies' all-reduce adds to it.
    """

    shard_size: int
    gather_s: float
    reduce_s: float

    @classmethod
    def of(
        cls, cost: CostModel, num_ranks: int, *, shard_size: int, layer_parameters: float, bytes_per_parameter: int = 2
    ) -> Sharding:
        """Times over the machine's links.

        Raises:
            ConfigurationError: the shard size does not divide the ranks.
        """
        if shard_size < 1 or num_ranks % shard_size:
            raise ConfigurationError(f"shard_size must divide the {num_ranks} ranks, got {shard_size}")
        machine = cost.machine
        bandwidths = (machine.intra_node_bytes_per_s, machine.inter_node_bytes_per_s)
        layer_bytes = layer_parameters * bytes_per_parameter
        gather_s = layer_bytes * (1 - 1 / shard_size) / bandwidths[shard_size > machine.ranks_per_node]
        copies = num_ranks // shard_size
        reduce_s = 2 * (layer_bytes / shard_size) * (1 - 1 / copies) / bandwidths[num_ranks > machine.ranks_per_node]
        return cls(shard_size, gather_s, gather_s + reduce_s)


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """One simulated step.

    Attributes:
        step_s: from the first layer's begin to the last gradient's reduction.
        busy_s: (N,) each rank's linear and attention time.
        exposed_exchange_s: (N,) time in which a rank waited for others or for links, all told.
    """

    step_s: float
    busy_s: FloatArray
    exposed_exchange_s: FloatArray

    @property
    def max_over_mean(self) -> float:
        """Of the ranks' busy time."""
        return float(self.busy_s.max() / self.busy_s.mean()) if self.busy_s.any() else 1.0


def simulate_step(
    plan: Plan,
    cost: CostModel,
    *,
    sharding: Sharding | None = None,
    overlap: bool = True,
    exchange_latency_s: float = 0.0,
    routed_channels: int = ROUTED_CHANNELS,
) -> Timeline:
    """Run ``cost.num_layers`` layers forward and backward under ``plan``; with recompute if the pass factor is 4.

    Args:
        plan: where everything is.
        cost: seconds of one layer's forward pass, layers, passes and links.
        sharding: FSDP2; without it parameters are simply there.
        overlap: whole sequences' attention runs during exchanges.
        exchange_latency_s: added to each exchange of a rank that takes part.
        routed_channels: of a token as it travels from home before the first layer and back behind the last one, in two
            bytes each; so do their gradients. 0 leaves routing out.

    Raises:
        ConfigurationError: the pass factor is less than that of a forward and a backward pass.
    """
    recompute_passes = cost.pass_factor - FORWARD_PASSES - BACKWARD_PASSES
    if recompute_passes < 0:
        raise ConfigurationError(f"a training step costs at least three forward passes, got {cost.pass_factor}")
    clocks = _Clocks(plan, cost, sharding, overlap, exchange_latency_s, routed_channels)
    clocks.route()
    for _ in range(cost.num_layers):
        clocks.gather()
        clocks.forward(FORWARD_PASSES)
    clocks.route()
    clocks.forget_gathered()
    clocks.route()
    for _ in range(cost.num_layers):
        clocks.gather()
        if recompute_passes:
            clocks.forward(recompute_passes)
        clocks.backward(BACKWARD_PASSES)
        clocks.reduce()
    clocks.route()
    busy_s = (clocks.linear + clocks.whole + clocks.split) * cost.num_layers * cost.pass_factor
    step_s = max(float(clocks.now.max()), float(clocks.reduced.max()))
    return Timeline(step_s, busy_s, step_s - busy_s)


class _Pairs:
    """The pairs of ranks that exchange anything: both ways round, and each rank with itself; ascending."""

    def __init__(self, left: IntArray, right: IntArray) -> None:
        self.left, self.right = left, right
        self.ranks, self.starts = np.unique(left, return_index=True)

    def of(self, values: FloatArray) -> FloatArray:
        """The larger of the two ranks' values."""
        return np.asarray(np.maximum(values[self.left], values[self.right]))

    def meet(self, ready: FloatArray, link_s: FloatArray) -> FloatArray:
        """(N,) when each rank is through an exchange that takes ``link_s`` for each pair; at once without peers."""
        if not len(self.ranks):
            return ready
        through = ready.copy()
        through[self.ranks] = np.maximum.reduceat(self.of(ready) + link_s, self.starts)
        return through


class _Clocks:
    """The ranks' clocks, and when each shard group's collectives are done."""

    def __init__(
        self,
        plan: Plan,
        cost: CostModel,
        sharding: Sharding | None,
        overlap: bool,
        exchange_latency_s: float,
        routed_channels: int,
    ) -> None:
        num_ranks = plan.world_size
        self.linear, self.whole, self.split = rank_seconds(plan, cost)
        moves: Traffic = traffic(plan, cost)
        self.pairs = _Pairs(moves.left, moves.right)
        self.before, self.after = (self.pairs.of(s) + exchange_latency_s for s in (moves.before_s, moves.after_s))
        away = routing(plan, cost, 2 * routed_channels)
        self.travellers = _Pairs(away.left, away.right) if routed_channels else _Pairs(away.left[:0], away.right[:0])
        self.away = self.travellers.of(away.link_s) + exchange_latency_s
        self.overlap = overlap
        self.sharding = sharding or Sharding(num_ranks, 0.0, 0.0)
        self.now = np.zeros(num_ranks)
        self.gathered = np.zeros(num_ranks // self.sharding.shard_size)
        self.began = np.zeros(num_ranks)
        self.reduced = np.zeros_like(self.gathered)

    def _of_groups(self, values: FloatArray) -> FloatArray:
        return np.asarray(values.reshape(-1, self.sharding.shard_size).max(axis=1))

    def _to_ranks(self, groups: FloatArray) -> FloatArray:
        return np.repeat(groups, self.sharding.shard_size)

    def route(self) -> None:
        """Tokens go from home to their ranks, or back."""
        self.now = self.travellers.meet(self.now, self.away)

    def gather(self) -> None:
        """The all-gather for the next layer runs while the layer before it computes, on all ranks of a shard group."""
        if not self.sharding.gather_s:
            return
        self.gathered = np.maximum(self.gathered, self._of_groups(self.began)) + self.sharding.gather_s
        self.now = np.maximum(self.now, self._to_ranks(self.gathered))
        self.began = self.now.copy()

    def forget_gathered(self) -> None:
        """Backward begins with an all-gather of its own, behind the forward pass."""
        self.began = self.now.copy()

    def reduce(self) -> None:
        """Gradients are reduced while the next layer computes; only the last one is waited for."""
        if self.sharding.reduce_s:
            self.reduced = np.maximum(self.reduced, self._of_groups(self.now)) + self.sharding.reduce_s

    def forward(self, passes: float) -> None:
        """One layer: linear, exchange of q, k, v beside whole sequences' attention, tiles, exchange back, linear."""
        ready = self.now + BEFORE_ATTENTION * self.linear * passes
        arrived = self.pairs.meet(ready, self.before)
        whole = self.whole * passes
        self.now = np.maximum(arrived, ready + whole) if self.overlap else arrived + whole
        self.now = self.now + self.split * passes
        self.now = self.pairs.meet(self.now, self.after)
        self.now = self.now + (1 - BEFORE_ATTENTION) * self.linear * passes

    def backward(self, passes: float) -> None:
        """The layer backwards: the output's gradient travels first; q, k and v's beside whole sequences' attention."""
        ready = self.now + (1 - BEFORE_ATTENTION) * self.linear * passes
        self.now = self.pairs.meet(ready, self.after)
        whole, ready = self.whole * passes, self.now + self.split * passes
        if self.overlap:
            self.now = np.maximum(self.pairs.meet(ready, self.before), ready + whole)
        else:
            self.now = self.pairs.meet(ready + whole, self.before)
        self.now = self.now + BEFORE_ATTENTION * self.linear * passes


def rank_seconds(plan: Plan, cost: CostModel) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(N,) seconds of one layer's forward pass: linear, attention of whole sequences, attention of tiles."""
    num_ranks = plan.world_size
    speeds = cost.machine.rank_speeds(num_ranks)
    linear = cost.linear_s_per_token * plan.rank_tokens / speeds
    sequence = plan.tile_sequence
    share = (plan.tile_head_end - plan.tile_head_start) / plan.num_heads
    rows = (plan.tile_query_end - plan.tile_query_start) / plan.lengths[sequence]
    seconds = cost.attention_s(plan.lengths)[sequence] * share * rows
    is_tile = plan.is_split[sequence]
    whole, tiles = (
        np.bincount(plan.tile_rank[chosen], seconds[chosen], minlength=num_ranks) / speeds
        for chosen in (~is_tile, is_tile)
    )
    return linear, whole, tiles
