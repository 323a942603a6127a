"""The cost model: lengths to FLOPs, seconds and bytes for ONE layer's forward pass, and its fit to measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from knapformer.errors import ConfigurationError
from knapformer.given.files import read_object
from knapformer.given.shapes import ModelShape, model_shape

FloatArray = npt.NDArray[np.float64]


MAX_HEADS = 2**16
MAX_LAYERS = 10_000
MAX_NODE = 2**31 - 1
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30
"""Of anything here that is not 0; so no time of any sequence is infinite, or 0."""

DEFAULT_LINK_MARGIN = 3.0
"""See ``Machine.link_margin``; chosen by the table of docs/planning.md."""

RECOMPUTE_PASSES, PLAIN_PASSES = 4.0, 3.0
"""Cost of a training step over its forward pass, with and without recomputing blocks in backward."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Links and relative speeds of the ranks.

    Attributes:
        ranks_per_node: ranks that share fast links; rank r of the world sits on node r // ranks_per_node.
        intra_node_bytes_per_s: bandwidth of a rank per direction inside a node.
        inter_node_bytes_per_s: the same between nodes.
        communication_scale: weight of the forward exchange's time; below 1 because backward and recompute move
            fewer bytes per FLOP than forward.
        bytes_per_element: of the activations that are exchanged.
        speeds: relative speed of each rank; empty means 1 everywhere.
        nodes: node of each rank of the balancing group, where nodes are unequal; empty means world rank //
            ranks_per_node.
        latency_s: of each exchange, once for each peer of a rank: α of the α-β model, in which a message of n bytes
            takes α + n·β (Hockney, The communication challenge for MPP, Parallel Computing 20, 1994).
        interference: with two lanes, the part of a rank's speed that a running exchange takes; 0.1 is a guess until a
            GPU has measured it.
        link_margin: links may be so many times slower than stated. Planners alone read it (docs/planning.md, "Slower
            links"); times are predicted with the links as stated. 1 means that these are certain.
    """

    ranks_per_node: int = 8
    intra_node_bytes_per_s: float = 300e9
    inter_node_bytes_per_s: float = 45e9
    communication_scale: float = 0.75
    bytes_per_element: int = 2
    speeds: tuple[float, ...] = ()
    nodes: tuple[int, ...] = ()
    latency_s: float = 0.0
    interference: float = 0.1
    link_margin: float = DEFAULT_LINK_MARGIN

    def __post_init__(self) -> None:
        _require_count("ranks_per_node", self.ranks_per_node)
        for name in ("speeds", "nodes"):
            values = getattr(self, name)
            if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
                raise ConfigurationError(f"{name} must list one number for each rank, got {values!r}")
            object.__setattr__(self, name, tuple(values))
        for name in ("intra_node_bytes_per_s", "inter_node_bytes_per_s", "bytes_per_element"):
            _require_positive(name, getattr(self, name))
        for name in ("communication_scale", "latency_s", "interference"):
            if not _is_number(getattr(self, name)) or getattr(self, name) < 0:
                raise ConfigurationError(f"{name} must be a number >= 0, got {getattr(self, name)!r}")
        if not _is_number(self.link_margin) or self.link_margin < 1:
            raise ConfigurationError(f"link_margin must be a number >= 1, got {self.link_margin!r}")
        for speed in self.speeds:
            _require_positive("speeds", speed)
        object.__setattr__(self, "speeds", tuple(map(float, self.speeds)))
        for node in self.nodes:
            is_whole = isinstance(node, int | np.integer) and not isinstance(node, bool)
            if not is_whole or abs(int(node)) > MAX_NODE:
                raise ConfigurationError(f"nodes must be integers of at most {MAX_NODE}, got {node!r}")
        object.__setattr__(self, "nodes", tuple(map(int, self.nodes)))

    def rank_speeds(self, num_ranks: int) -> FloatArray:
        """(N,) relative speed of each rank."""
        return np.asarray(self._per_rank("speeds", self.speeds, num_ranks) or [1.0] * num_ranks, np.float64)

    def rank_nodes(self, num_ranks: int) -> npt.NDArray[np.int32]:
        """(N,) node of each rank."""
        nodes = self._per_rank("nodes", self.nodes, num_ranks) or [r // self.ranks_per_node for r in range(num_ranks)]
        return np.asarray(nodes, np.int32)

    def holding(self, world_ranks: Sequence[int]) -> Machine:
        """The machine as a balancing group of these ranks sees it: with the nodes that they really sit on.

        ``nodes``, where given, are those of the group's ranks already.
        """
        nodes = tuple(rank // self.ranks_per_node for rank in world_ranks)
        if self.nodes or nodes == tuple(r // self.ranks_per_node for r in range(len(nodes))):
            return self
        return replace(self, nodes=nodes)

    @staticmethod
    def _per_rank(name: str, values: Sequence[float], num_ranks: int) -> list[float]:
        if values and len(values) != num_ranks:
            raise ConfigurationError(f"machine.{name} lists {len(values)} ranks, the balancing group has {num_ranks}")
        return list(values)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of one layer's forward pass as a function of sequence lengths.

    ``workload(L) = linear_flops_per_token · L + γ · attention_flops_per_pair · L²``; for a plain block of width d with
    MLP ratio 4 that is the KnapFormer paper's ``24·L·d² + γ·4·L²·d`` (arXiv 2508.06001).

    Attributes:
        hidden: model width d.
        num_heads: attention heads.
        gamma: time per attention FLOP over time per linear-phase FLOP. No FLOP count contains it.
        flops_per_s: linear-phase FLOP/s of a rank of speed 1.
        linear_flops_per_token: all token-wise work of a layer; None means 24·d².
        attention_flops_per_pair: per query-key pair over all heads, without γ; None means 4·d.
        attention_span_tokens: keys that one query attends to; None means the whole sequence (L² pairs), a number w
            means L·min(L, w) pairs, for windowed, linear or factorised attention.
        num_layers: layers of the model; turns the makespan into a step time.
        pass_factor: cost of a training step over that of its forward pass: 3 (forward and backward), 4 with recompute.
        machine: links and speeds.
    """

    hidden: int = 3072
    num_heads: int = 24
    gamma: float = 0.6
    flops_per_s: float = 500e12
    linear_flops_per_token: float | None = None
    attention_flops_per_pair: float | None = None
    attention_span_tokens: int | None = None
    num_layers: int = 1
    pass_factor: float = 3.0
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        _require_count("num_heads", self.num_heads)
        if self.num_heads > MAX_HEADS:
            raise ConfigurationError(f"num_heads must be {MAX_HEADS} at most, got {self.num_heads}")
        if not isinstance(self.machine, Machine):
            raise ConfigurationError(f"machine must be a Machine, got {self.machine!r}")
        _require_count("num_layers", self.num_layers)
        if self.num_layers > MAX_LAYERS:
            raise ConfigurationError(f"num_layers must be {MAX_LAYERS} at most, got {self.num_layers}")
        for name in ("hidden", "flops_per_s", "pass_factor"):
            _require_positive(name, getattr(self, name))
        for name in ("linear_flops_per_token", "attention_flops_per_pair", "attention_span_tokens"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if not _is_number(self.gamma) or self.gamma < 0:
            raise ConfigurationError(f"gamma must be a number >= 0, got {self.gamma!r}")

    @classmethod
    def from_shape(cls, shape: ModelShape, **overrides: Any) -> CostModel:
        """The cost of a layer of ``shape``; anything else (gamma, flops_per_s, machine, …) by keyword."""
        return cls(
            **{
                "hidden": shape.attention_width,
                "num_heads": shape.num_heads,
                "linear_flops_per_token": shape.linear_flops_per_token,
                "attention_flops_per_pair": shape.attention_flops_per_pair,
                "num_layers": shape.num_layers,
                **overrides,
            }
        )

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> CostModel:
        """The cost of a layer of a known model such as ``flux.1-dev``; see ``knapformer.given.shapes``."""
        return cls.from_shape(model_shape(name), **overrides)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CostModel:
        """Read a cost file's content; what it says of how it was ``measured`` is left out.

        Raises:
            ConfigurationError: a key is missing or unknown, or a value is out of range.
        """
        if not isinstance(content, Mapping):
            raise ConfigurationError(f"a cost file is a JSON object, got {type(content).__name__}")
        for name in ("hidden", "num_heads"):
            if name not in content:
                raise ConfigurationError(f"a cost file needs {name!r}, got keys {sorted(map(str, content))}")
        machine = content.get("machine", {})
        if not isinstance(machine, Mapping):
            raise ConfigurationError(f"machine must be an object, got {machine!r}")
        known = {f.name for f in fields(cls)} - {"machine"}
        values = {key: value for key, value in content.items() if key in known}
        unknown = set(content) - known - {"machine", "measured", "schema"}
        unknown |= {f"machine.{key}" for key in set(machine) - {f.name for f in fields(Machine)}}
        if unknown:
            raise ConfigurationError(f"unknown keys in a cost file: {sorted(map(str, unknown))}")
        values.setdefault("gamma", 1.0)
        try:
            return cls(machine=Machine(**machine), **values)
        except ConfigurationError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(f"a cost file has a value of the wrong type: {error}") from None

    @classmethod
    def read(cls, path: str | Path) -> CostModel:
        """Read a cost file (JSON)."""
        return cls.from_dict(read_object(path, "a cost file"))

    def to_dict(self) -> dict[str, Any]:
        """The content of a cost file; ``from_dict`` of it gives an equal model."""
        return asdict(self)

    def with_machine(self, **changes: Any) -> CostModel:
        """The same on a machine with other values."""
        return replace(self, machine=replace(self.machine, **changes))

    @property
    def linear_s_per_token(self) -> float:
        """Seconds of one token's linear phase on a rank of speed 1."""
        flops = 24.0 * self.hidden**2 if self.linear_flops_per_token is None else self.linear_flops_per_token
        return flops / self.flops_per_s

    @property
    def flops_per_pair(self) -> float:
        """FLOPs of one query and one key over all heads, without γ."""
        return 4.0 * self.hidden if self.attention_flops_per_pair is None else self.attention_flops_per_pair

    @property
    def bytes_per_head_token(self) -> float:
        """Bytes of one head of one token, of each of q, k, v and the output."""
        return self.hidden / self.num_heads * self.machine.bytes_per_element

    def attention_s(self, lengths_tokens: npt.ArrayLike) -> FloatArray:
        """(S,) seconds of each sequence's attention over all heads, on a rank of speed 1."""
        lengths = np.asarray(lengths_tokens, np.float64)
        keys = lengths if self.attention_span_tokens is None else np.minimum(lengths, self.attention_span_tokens)
        return np.asarray(self.gamma * self.flops_per_pair / self.flops_per_s * lengths * keys)

    def work_s(self, lengths_tokens: npt.ArrayLike) -> FloatArray:
        """(S,) seconds of each sequence's linear phase and attention, alone on a rank of speed 1."""
        return np.asarray(
            self.linear_s_per_token * np.asarray(lengths_tokens, np.float64) + self.attention_s(lengths_tokens)
        )


@dataclass(frozen=True, slots=True)
class PackSample:
    """One measured pack: the lengths that ran together, and the seconds they took."""

    lengths_tokens: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """``seconds = t0_s + s_per_token · ΣL + s_per_pair · ΣL²`` with its quality on the samples that made it."""

    t0_s: float
    s_per_token: float
    s_per_pair: float
    r2: float
    mape: float

    def predict_s(self, lengths_tokens: Iterable[int]) -> float:
        """Seconds of one pack of these lengths."""
        lengths = np.asarray(list(lengths_tokens), np.float64)
        return float(self.t0_s + self.s_per_token * lengths.sum() + self.s_per_pair * (lengths**2).sum())

    def mape_on(self, samples: Sequence[PackSample]) -> float:
        """Mean absolute percentage error, as a fraction, on other samples than those of the fit."""
        return float(np.mean([abs(self.predict_s(s.lengths_tokens) / s.seconds - 1.0) for s in samples]))

    def to_cost(self, cost: CostModel, seconds_per_pass: float = 1.0) -> CostModel:
        """``cost`` with the measured speed and γ.

        Args:
            cost: gives the FLOPs per token and per pair.
            seconds_per_pass: measured passes per forward pass (layers × pass factor of what was timed).
        """
        if self.s_per_token <= 0:
            raise ConfigurationError("the fit has no linear term: time more packs of short sequences")
        flops_per_s = cost.linear_s_per_token * cost.flops_per_s / (self.s_per_token / seconds_per_pass)
        gamma = (self.s_per_pair / seconds_per_pass) * flops_per_s / cost.flops_per_pair
        return replace(cost, flops_per_s=flops_per_s, gamma=gamma)


def fit(samples: Sequence[PackSample]) -> Fit:
    """Fit the three-term model to measured packs by non-negative least squares on relative errors.

    With three unknowns the non-negative optimum is found exactly by trying each subset of terms (an optimum is an
    unconstrained optimum over its own support). Only subsets with the linear term are tried: a cost model without it
    would have ranks of endless speed, and a few noisy times can look like one. Rows are divided by the measured time,
    so that short packs count.

    Raises:
        ConfigurationError: fewer than four samples.
    """
    if len(samples) < 4:
        raise ConfigurationError(f"a fit of three terms needs at least four samples, got {len(samples)}")
    seconds = np.asarray([s.seconds for s in samples])
    sums = [(1.0, float(sum(s.lengths_tokens)), float(sum(n * n for n in s.lengths_tokens))) for s in samples]
    rows = np.asarray(sums) / seconds[:, None]
    scale = np.maximum(rows.max(axis=0), np.finfo(float).tiny)
    best, best_error = np.zeros(3), np.inf
    for support in ([1, *others] for size in range(3) for others in combinations((0, 2), size)):
        solution = np.linalg.lstsq(rows[:, support] / scale[support], np.ones(len(samples)), rcond=None)[0]
        error = float(((rows[:, support] / scale[support]) @ solution - 1.0).__pow__(2).sum())
        if (solution >= 0).all() and error < best_error:
            best, best_error = np.zeros(3), error
            best[support] = solution / scale[support]
    predicted = np.asarray(sums) @ best
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    r2 = 1.0 - float(((seconds - predicted) ** 2).sum()) / spread if spread else 1.0
    t0_s, s_per_token, s_per_pair = best.tolist()
    return Fit(t0_s, s_per_token, s_per_pair, r2, float(np.abs(predicted / seconds - 1.0).mean()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _require_positive(name: str, value: Any) -> None:
    if not _is_number(value) or value <= 0:
        raise ConfigurationError(f"{name} must be a number above 0, {MAX_NUMBER:g} at most, got {value!r}")
    if value < MIN_NUMBER:
        raise ConfigurationError(f"{name} must be {MIN_NUMBER:g} at least, got {value!r}")


def _require_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ConfigurationError(f"{name} must be an integer above 0, got {value!r}")
