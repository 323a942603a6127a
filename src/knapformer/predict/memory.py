"""Peak memory of a training step on one rank: parameters and optimizer under FSDP2, activations, exchange buffers.

What a block keeps per token was measured on this package's MMDiT by following every tensor (``memory_probe``) and is
linear in the width and in the MLP's inner width. Other models are assumed to keep as much as its double-stream block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from knapformer.errors import CapacityError, ConfigurationError
from knapformer.given.shapes import ModelShape

Recompute = Literal["none", "block"]


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Elements per token, as multiples of the width and of the MLP's inner width.

    Attributes:
        saved: kept from a block's forward to its backward pass.
        working: in use during its backward pass, beyond what is saved.
    """

    saved: tuple[float, float]
    working: tuple[float, float]


BLOCKS: dict[tuple[str, Recompute], BlockMemory] = {
    ("double", "none"): BlockMemory((18.12, 2.0), (4.76, 0.0)),
    ("single", "none"): BlockMemory((13.11, 2.0), (3.5, 0.6)),
    ("double", "block"): BlockMemory((1.0, 0.0), (24.1, 2.1)),
    ("single", "block"): BlockMemory((1.0, 0.0), (15.5, 3.0)),
}

BLOCK_WEIGHTS = {"double": 36, "single": 15}
"""Parameters of a block with MLP ratio 4 as multiples of width², modulation included."""

STATE_BYTES_PER_PARAMETER = 16
"""Float32 parameter and gradient, and AdamW's two moments."""

GATHERED_LAYERS = 2
"""Layers whose gathered parameters FSDP2 holds at once: the one that computes and the next one."""


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Bytes of one rank.

    Attributes:
        parameters: of the whole model.
        blocks: kinds of its blocks in order, ``double`` or ``single``.
        width, mlp_width: channels.
        io_channels: channels of a token outside the blocks, in and out.
        recompute: whether blocks are recomputed in backward.
        bytes_per_element: of activations and gathered parameters.
        shard_size: ranks over which FSDP2 shards; 1 keeps all states here and gathers nothing.
        state_bytes_per_parameter: of parameter, gradient and optimizer; the gradient's 4 count as they are made.
    """

    parameters: float
    blocks: Sequence[str]
    width: int
    mlp_width: int
    io_channels: int = 64
    recompute: Recompute = "block"
    bytes_per_element: int = 2
    shard_size: int = 8
    state_bytes_per_parameter: float = STATE_BYTES_PER_PARAMETER

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.blocks if (kind, self.recompute) not in BLOCKS]
        if unknown or not self.blocks:
            raise ConfigurationError(f"blocks must be double or single with recompute none or block, got {unknown}")
        if self.shard_size < 1:
            raise ConfigurationError(f"shard_size must be at least 1, got {self.shard_size}")

    @classmethod
    def of_model(cls, name: str, shape: ModelShape, *, shard_size: int, recompute: Recompute = "block") -> MemoryModel:
        """A known model in bf16 with float32 states.

        Raises:
            ConfigurationError: its number of parameters is not known.
        """
        if not shape.parameters:
            raise ConfigurationError(f"the number of parameters of {name!r} is not known")
        return cls(
            parameters=shape.parameters,
            blocks=("double",) * shape.num_layers,
            width=shape.width,
            mlp_width=shape.mlp_width or 4 * shape.width,
            recompute=recompute,
            shard_size=shard_size,
        )

    @property
    def layer_parameters(self) -> float:
        """Parameters of a block, all alike."""
        return self.parameters / len(self.blocks)

    @property
    def fixed_bytes(self) -> float:
        """States, and under FSDP2 the gathered layers and the gradients of one before they are reduced."""
        states = self.parameters * self.state_bytes_per_parameter / self.shard_size
        if self.shard_size == 1:
            return states
        return states + (GATHERED_LAYERS + 1) * self.layer_parameters * self.bytes_per_element

    @property
    def bytes_per_token(self) -> float:
        """Activations per token where they are most: in the backward pass of the last block, or before doubles end."""
        return float(self._activation_elements.max()) * self.bytes_per_element

    def peak_bytes(self, tokens: int, *, exchanged_elements: float = 0.0) -> float:
        """Peak of a step with ``tokens`` on this rank.

        Gradients appear block by block as activations go; the peak is the largest sum of both, in the backward pass of
        one of the blocks.

        Args:
            tokens: that the rank holds.
            exchanged_elements: see ``exchange_elements``.
        """
        weights = np.asarray([BLOCK_WEIGHTS[kind] for kind in self.blocks], np.float64)
        gradient_bytes = 4 * self.parameters / self.shard_size
        done = 1 - np.cumsum(weights) / weights.sum()
        activations = self._activation_elements * self.bytes_per_element * tokens
        worst = float((activations + done * gradient_bytes).max())
        peak = max(self.fixed_bytes - gradient_bytes + worst, self.fixed_bytes)
        return peak + exchanged_elements * self.bytes_per_element

    def exchange_elements(
        self, split_tokens: float, tile_units: float, head_width: int, *, keeps_own: bool = True
    ) -> float:
        """Elements that sharing sequences adds to the peak, as measured (tests/execution/test_exchange_memory.py).

        Attention keeps q, k, v and output of its tiles for the backward pass, in every block or, recomputed, in one.
        Those of the rank's own tokens it need not keep, unless at least as many tokens of whole sequences lie in the
        same tensors: those are copied where they are fewer. Packed and unpacked rows of one exchange come on top.

        Args:
            split_tokens: tokens of split sequences that the rank holds.
            tile_units: heads × rows of its attention tiles.
            head_width: channels of a head.
            keeps_own: whether q, k and v of its own split tokens are kept for that reason.
        """
        own, tiles = self.width * split_tokens, head_width * tile_units
        kept = 4 * tiles - (0 if keeps_own else 3 * own)
        return max(0.0, kept * (len(self.blocks) if self.recompute == "none" else 1) + 2 * (own + tiles))

    def tokens_that_fit(self, memory_bytes: float) -> int:
        """Most tokens of a rank with this much memory.

        Raises:
            CapacityError: not even the parameters and their states fit; by how much.
        """
        if self.peak_bytes(1) > memory_bytes:
            raise CapacityError(
                f"states and gathered parameters take {self.peak_bytes(1) / 1e9:.1f} GB of a rank that has "
                f"{memory_bytes / 1e9:.1f} GB, {(self.peak_bytes(1) - memory_bytes) / 1e9:.1f} GB too many; shard over "
                f"more than {self.shard_size} ranks"
            )
        low, high = 1, int(memory_bytes / self.bytes_per_token) + 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak_bytes(middle) <= memory_bytes else (low, middle)
        return low

    @cached_property
    def _activation_elements(self) -> npt.NDArray[np.float64]:
        """(blocks,) per token, while each block is in its backward pass."""
        widths = np.asarray([self.width, self.mlp_width], np.float64)
        kinds = [BLOCKS[kind, self.recompute] for kind in self.blocks]
        saved = np.cumsum([widths @ kind.saved for kind in kinds])
        working = np.asarray([widths @ kind.working for kind in kinds])
        return np.asarray(saved + working + (6 if self.recompute == "none" else 2) * self.io_channels)
