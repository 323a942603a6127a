"""Cost files: whose cost one holds, on what it was measured, and what it may stand for.

One rule for all commands. A cost file holds the cost of one layer, so it stands for every model with that layer, at
any depth, and for no other: its width, heads and FLOPs must be the model's. Where times are compared with it
(``replay``), it must also have been measured in the same way on the same device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.given.files import checked_object, read_object
from knapformer.given.shapes import ModelShape, named_shape

MOST_S = 1e6
"""Of one measurement."""


class Environment(BaseModel):
    """Where a file was made."""

    model_config = ConfigDict(strict=True)
    device: str | None = None


class FittedTerms(BaseModel):
    """What replay takes from a fit."""

    model_config = ConfigDict(strict=True)
    t0_s: Annotated[float, Field(ge=0, le=MOST_S)] = 0.0


class Measured(BaseModel):
    """What ``calibrate`` says of how it measured; nothing of it is needed where a file was written by hand."""

    model_config = ConfigDict(strict=True, protected_namespaces=())
    model: str | None = None
    dtype: str | None = None
    recompute: bool | None = None
    num_blocks: list[int] | None = None
    environment: Environment = Environment()
    fit: FittedTerms = FittedTerms()
    reference_s: Annotated[float, Field(gt=0, le=MOST_S)] | None = None
    links: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CostFile:
    """A cost file.

    Attributes:
        path: where it was read.
        cost: of one layer of its model, as deep as that.
        measured: how; empty where the file does not say.
        content: all of it.
    """

    path: Path
    cost: CostModel
    measured: Measured
    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: str | Path) -> CostFile:
        """Read a file of ``calibrate``, or one written by hand.

        Raises:
            ConfigurationError: it cannot be read, a value is out of range, or its cost is not its model's.
        """
        content = read_object(path, "a cost file")
        measured = checked_object(Measured, content.get("measured", {}), f"{path}: measured")
        try:
            cost = CostModel.from_dict(content)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from None
        found = cls(Path(path), cost, measured, content)
        if measured.model is not None:
            found.for_model(measured.model)
        return found

    @property
    def device(self) -> str | None:
        """On which it was measured."""
        return self.measured.environment.device

    @property
    def speeds(self) -> str:
        """What times that rest on this file rest on."""
        if self.device is None:
            return f"speeds of {self.path}, which does not say where they were measured"
        return f"speeds measured on {self.device}{'' if self.measured.links else ', assumed links'} ({self.path})"

    def for_model(self, name: str) -> CostModel:
        """The cost of a known model, or of ``demo``.

        Raises:
            ConfigurationError: its layers are others than those of this file.
        """
        return self.for_shape(named_shape(name), name)

    def for_shape(self, shape: ModelShape, name: str) -> CostModel:
        """The cost of a model of this shape: this file's layer, as often as the model has it.

        Raises:
            ConfigurationError: its layers are others than those of this file.
        """
        wanted = CostModel.from_shape(shape, attention_span_tokens=self.cost.attention_span_tokens)
        own, other = _layer(self.cost), _layer(wanted)
        if any(abs(own[what] - other[what]) > 1e-9 * other[what] for what in own):
            differing = [what for what in own if abs(own[what] - other[what]) > 1e-9 * other[what]][:2]
            whose = f" of {self.measured.model}" if self.measured.model else ""
            raise ConfigurationError(
                f"{self.path} holds the cost of a layer{whose} with {_described(own, differing)}; {name} has "
                f"{_described(other, differing)}. A cost file stands for models of one layer only: calibrate {name}, "
                "or leave --cost out"
            )
        return replace(self.cost, num_layers=shape.num_layers)

    def check_measured(self, described: Mapping[str, Any], device: str | None = None) -> None:
        """Check that times can be compared with this file's.

        Args:
            described: what the file must say of how it was measured, by name.
            device: on which; None where any will do.

        Raises:
            ConfigurationError: naming what differs, or what the file does not say.
        """
        for name, value in {**described, "device": device}.items():
            found = self.device if name == "device" else getattr(self.measured, name)
            if value is None or found == value:
                continue
            if found is None:
                raise ConfigurationError(f"{self.path} does not say with which {name} it was measured; calibrate does")
            raise ConfigurationError(f"{self.path} was measured with {name} {found}, this is {name} {value}")


def _layer(cost: CostModel) -> dict[str, float]:
    """What makes one layer's cost, but for speeds."""
    return {
        "width": cost.hidden,
        "heads": cost.num_heads,
        "FLOPs a token": cost.linear_s_per_token * cost.flops_per_s,
        "FLOPs a pair": cost.flops_per_pair,
    }


def _described(layer: Mapping[str, float], names: list[str]) -> str:
    return ", ".join(f"{name} {layer[name]:.6g}" for name in names)
