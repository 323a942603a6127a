"""A call of a balanced transformer in diffusers' style: its arguments by name, and what it gives back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knapformer.adapters.family import Family
from knapformer.adapters.packing import Batch
from knapformer.errors import ConfigurationError


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a balanced transformer's forward.

    Attributes:
        arguments: what the family's ``pack`` takes, by name.
        return_dict: as diffusers has it.
    """

    arguments: Mapping[str, Any]
    return_dict: bool

    @classmethod
    def of(cls, family: Family, inputs: Sequence[Any], named_inputs: Mapping[str, Any]) -> Call:
        """Name the arguments as diffusers' forward does, and take out those that change nothing.

        Raises:
            TypeError: more arguments than it has, or one of them twice.
            ConfigurationError: one that a balanced model has no use for is set.
        """
        parameters = dict(list(inspect.signature(family.model.forward).parameters.items())[1:])
        if len(inputs) > len(parameters):
            raise TypeError(f"forward takes {len(parameters)} arguments, got {len(inputs)}")
        given = dict(zip(parameters, inputs, strict=False))
        twice = sorted(set(given) & set(named_inputs))
        if twice:
            raise TypeError(f"forward got {', '.join(twice)} by position and by name")
        arguments = {**given, **named_inputs}
        return_dict = bool(arguments.pop("return_dict", True))
        taken = inspect.signature(family.pack).parameters
        for name in (name for name in parameters if name not in taken):
            if not _changes_nothing(arguments.pop(name, None)):
                raise ConfigurationError(
                    f"a balanced model does not take {name}"
                    + (" other than {'scale': 1.0}; set LoRA scales with peft" if name in ATTENTION_KWARGS else "")
                )
        return cls(arguments, return_dict)

    def output(self, rows: Tensor, batch: Batch, config: Any, step: Any, stream: str | None) -> Any:
        """What forward returns, from the rows at home (T_home, C), which are those of ``stream`` in ``step``."""
        from knapformer.adapters.output import BalancedOutput, Counted

        # FSDP2 warns of outputs that are views.
        rows = rows.clone()
        hidden_states = self.arguments.get("hidden_states")
        if isinstance(hidden_states, Tensor):
            sample: Any = _stacked(batch.unpack(rows), rows, hidden_states.shape, config)
        else:
            sample = [part.clone() for part in batch.unpack(rows)]
        if self.return_dict:
            return BalancedOutput(sample=sample, rows=rows, counted=Counted(step.lengths, stream))
        return (sample,) if isinstance(sample, Tensor) else (sample, rows)


ATTENTION_KWARGS = ("attention_kwargs", "joint_attention_kwargs")
"""Arguments of attention processors; diffusers takes the scale of LoRA layers from them."""


def _changes_nothing(value: Any) -> bool:
    """Whether an argument of diffusers' forward leaves its result as it is: None, False or a scale of 1."""
    if isinstance(value, Mapping):
        return all(name == "scale" and scale == 1.0 for name, scale in value.items())
    return value is None or value is False


def _stacked(parts: list[Tensor], rows: Tensor, shape: Sequence[int], config: Any) -> Tensor:
    """A batch of samples of one size; of none, too, with a graph.

    Args:
        shape: of the batched hidden states: (B, L, C) of tokens, or (B, C, …) of latents.
    """
    if parts:
        return torch.stack(parts)
    if len(shape) == 3:
        return rows.reshape(0, shape[1], rows.shape[1])
    return rows.reshape(0, config.out_channels or config.in_channels, *shape[2:])
