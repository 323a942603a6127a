"""Run and time a stand-in of a model's blocks, forward and backward, on the one device at hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.given.shapes import DEMO, named_shape
from knapformer.models import MMDiT, MMDiTConfig, StreamIndex, local_attention
from knapformer.models.layers import Attention
from knapformer.models.presets import cost_template, make_config
from knapformer.training.parallel import checkpoint

INIT_STD = 0.02
"""Of all weights: the usual zeros at the end of each block would make every value behind them trivial."""

REFERENCE_PACK = (192, 192)
"""Sequences of the pack that drift is measured by."""

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """Which model's blocks are run, on what and how: all that can be said before they are built.

    Attributes:
        model: a known one, or ``demo``.
        dtype: a name of ``DTYPES``.
        device: where.
        recompute: blocks are recomputed in backward.
        num_blocks: double-stream blocks, and as many single-stream ones.
    """

    model: str
    dtype: str
    device: torch.device
    recompute: bool
    num_blocks: int

    def __post_init__(self) -> None:
        named_shape(self.model)
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    def describe(self) -> dict[str, Any]:
        """What times of it hold for: only another one of the same description can be compared with them."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "recompute": self.recompute,
            "num_blocks": [self.num_blocks, self.num_blocks],
        }

    def build(self) -> ModelRunner:
        """Make it."""
        return ModelRunner.of_model(
            self.model,
            dtype=DTYPES[self.dtype],
            device=self.device,
            recompute=self.recompute,
            num_blocks=self.num_blocks,
        )


class ModelRunner:
    """An MMDiT that trains on whatever tokens it is given; it has no optimizer and no text.

    Args:
        config: of the model.
        dtype: of parameters and tokens.
        device: where.
        recompute: blocks are recomputed in backward.
    """

    def __init__(self, config: MMDiTConfig, *, dtype: torch.dtype, device: torch.device, recompute: bool) -> None:
        torch.manual_seed(0)
        self.config, self.dtype, self.device, self.recompute = config, dtype, device, recompute
        self.model = MMDiT(config)
        self.model.reset_parameters(init_std=INIT_STD)
        self.model.to(device, dtype)
        if recompute:
            checkpoint(self.model, what="block")

    @classmethod
    def of_model(
        cls, name: str, *, dtype: torch.dtype, device: torch.device, recompute: bool, num_blocks: int = 1
    ) -> ModelRunner:
        """The demo's or a known model's width and heads, with ``num_blocks`` double- and as many single-stream blocks.

        Raises:
            ConfigurationError: an unknown model.
        """
        shape = named_shape(name)
        config = make_config(
            num_heads=shape.num_heads,
            head_width=shape.head_width,
            num_double_blocks=num_blocks,
            num_single_blocks=num_blocks,
        )
        if name != DEMO:
            config = replace(config, in_channels=64, out_channels=64)
        return cls(config, dtype=dtype, device=device, recompute=recompute)

    @property
    def template(self) -> CostModel:
        """The FLOPs of this stand-in, with its layers and passes."""
        size = torch.empty((), dtype=self.dtype).element_size()
        return cost_template(self.config, recompute=self.recompute, bytes_per_element=size, ranks_per_node=8)

    def train(self, lengths: Sequence[int], attention: Attention | None = None) -> None:
        """Forward and backward over packed visual tokens; does not wait for the device.

        Args:
            lengths: tokens of each sequence, or part of one, on this rank.
            attention: by default each of them attends to itself.
        """
        num_rows = sum(lengths)

        def rows(count: int, width: int) -> Tensor:
            return torch.full((count, width), 0.5, device=self.device, dtype=self.dtype)

        counts = torch.tensor(list(lengths), dtype=torch.int64)
        output = self.model(
            rows(num_rows, self.config.in_channels),
            rows(0, self.config.text_channels),
            torch.arange(num_rows, device=self.device).unsqueeze(1).expand(-1, 3),
            rows(len(lengths), self.config.conditioning_channels),
            torch.repeat_interleave(torch.arange(len(lengths)), counts).to(self.device),
            StreamIndex.from_lengths([0] * len(lengths), lengths, device=self.device),
            attention=local_attention(lengths) if attention is None else attention,
        )
        output.square().mean().backward()
        self.model.zero_grad(set_to_none=True)


def seconds_of(run: Callable[[], None], device: torch.device) -> float:
    """Of one call: by device events on CUDA; elsewhere processor time of this thread, on which torch must run alone.

    Others on the machine still slow it through caches and memory, but not by taking turns on a core.
    """
    if device.type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        return 1e-3 * float(first.elapsed_time(last))
    began = time.thread_time()
    run()
    return time.thread_time() - began


class Stopwatch:
    """Times runs on a machine whose speed drifts, because others use it too or it grows warm.

    On the CPU a short reference pack is timed before and after each run, and a run counts in units of it: what slows
    both falls out. ``seconds`` turns units back into seconds, at the machine's median speed over all references. On
    CUDA runs count in seconds.

    Args:
        runner: runs the reference.
        reference_s: what a reference took when the times were measured that these ones are compared with.
    """

    def __init__(self, runner: ModelRunner, reference_s: float | None = None) -> None:
        self.runner, self.given_s = runner, reference_s
        self.references: list[float] = []
        self._refer()

    def units(self, run: Callable[[], None]) -> float:
        """Of one call of ``run``."""
        if self.runner.device.type == "cuda":
            return seconds_of(run, self.runner.device)
        before = self.references[-1]
        seconds = seconds_of(run, self.runner.device)
        return 2 * seconds / (before + self._refer())

    def seconds(self, units: Sequence[float]) -> float:
        """The median of several measurements of the same run."""
        return statistics.median(units) * self.reference_s

    @property
    def reference_s(self) -> float:
        """Seconds of a reference: as given, or the median so far."""
        return statistics.median(self.references) if self.given_s is None else self.given_s

    def _refer(self) -> float:
        if self.runner.device.type == "cuda":
            reference = 1.0
        else:
            reference = seconds_of(lambda: self.runner.train(REFERENCE_PACK), self.runner.device)
        self.references.append(reference)
        return reference
