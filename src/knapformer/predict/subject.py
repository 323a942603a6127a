"""What a command predicts: which model, at which speeds, on ranks with which memory; and whose choice each was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knapformer.errors import ConfigurationError
from knapformer.given.cost import RECOMPUTE_PASSES, CostModel
from knapformer.given.shapes import MODEL_SHAPES, ModelShape, model_shape
from knapformer.predict.hardware import Hardware, hardware
from knapformer.predict.memory import MemoryModel, Recompute

DEFAULT_MODEL, DEFAULT_HARDWARE = "flux.1-dev", "h100"

BY_OPTION, BY_FILE, BY_WORKLOAD, BY_DEFAULT = "as asked", "the cost file's", "the workload's own", "by default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model at certain speeds.

    Attributes:
        model: its name; None for a cost file that names none.
        chosen: who chose the model, in words for people.
        workload_model: that the workload is of, where there is one.
        cost: of a layer, its layers, and the machine.
        speeds: what times rest on, in words for people.
        is_measured: whether they come from a cost file.
        device: gives the memory of a rank.
        device_chosen: who chose it.
    """

    model: str | None
    chosen: str
    workload_model: str | None
    cost: CostModel
    speeds: str
    is_measured: bool
    device: Hardware
    device_chosen: str

    @property
    def shape(self) -> ModelShape | None:
        """Of the model, where it is a known one."""
        return None if self.model is None else MODEL_SHAPES.get(self.model)

    @property
    def exchange_latency_s(self) -> float:
        """Of one exchange, beyond what the cost's machine says."""
        return 0.0 if self.is_measured else self.device.exchange_latency_s

    @property
    def named(self) -> str:
        """The model, and whose choice it was."""
        whose = self.chosen
        if self.workload_model not in (None, self.model):
            whose += f"; the workload's own is {self.workload_model}"
        return f"{self.model or 'a model without a name'} ({whose})"

    def memory(self, shard_size: int) -> MemoryModel | None:
        """Of a rank, with recompute if the cost counts it; None for a model whose parameters are not known."""
        if self.model is None or self.shape is None:
            return None
        recompute: Recompute = "block" if self.cost.pass_factor >= RECOMPUTE_PASSES else "none"
        return MemoryModel.of_model(self.model, self.shape, shard_size=shard_size, recompute=recompute)

    def describe(self) -> dict[str, Any]:
        """For a results file."""
        return {
            "model": self.model,
            "model_chosen": self.chosen,
            "workload_model": self.workload_model,
            "num_layers": self.cost.num_layers,
            "speeds": self.speeds,
            "memory_of": f"{self.device.name} ({self.device_chosen})",
        }


def find_subject(
    *,
    model: str | None = None,
    device: str | None = None,
    cost_file: Path | None = None,
    workload_model: str | None = None,
) -> Subject:
    """The model that is named, else the cost file's, else the workload's, else the default; on its hardware.

    A cost file replaces the hardware's speeds; the hardware then stands for memory alone.

    Args:
        model: asked for.
        device: a known kind of node, asked for.
        cost_file: of ``calibrate``, or written by hand.
        workload_model: that trains on the lengths.

    Raises:
        ConfigurationError: a name is not known, or the file may not stand for the model (``given.cost_files``).
    """
    node, node_chosen = hardware(device or DEFAULT_HARDWARE), BY_OPTION if device else BY_DEFAULT
    common: Mapping[str, Any] = {"workload_model": workload_model, "device": node, "device_chosen": node_chosen}
    if cost_file is not None:
        return _of_file(cost_file, model, common)
    name = (model or workload_model or DEFAULT_MODEL).lower()
    return Subject(
        model=name,
        chosen=BY_OPTION if model else BY_WORKLOAD if workload_model else BY_DEFAULT,
        cost=node.cost(model_shape(name)),
        speeds=f"assumed speeds of {node.name}",
        is_measured=False,
        **common,
    )


def _of_file(path: Path, model: str | None, common: Mapping[str, Any]) -> Subject:
    from knapformer.given.cost_files import CostFile

    file = CostFile.read(path)
    name = file.measured.model if model is None else model.lower()
    cost = file.cost if name is None else file.for_model(name)
    speeds = file.speeds
    if cost.num_layers != file.cost.num_layers:
        speeds += f", scaled from {file.cost.num_layers} layers to {cost.num_layers}"
    return Subject(
        model=name, chosen=BY_OPTION if model else BY_FILE, cost=cost, speeds=speeds, is_measured=True, **common
    )


def require_shape(subject: Subject, what: str) -> ModelShape:
    """The shape of a subject's model.

    Args:
        subject: whose.
        what: needs it, for the error.

    Raises:
        ConfigurationError: the cost file names no known model.
    """
    if subject.shape is None:
        raise ConfigurationError(f"{what} needs a model whose memory is known (--model), got {subject.named}")
    return subject.shape
