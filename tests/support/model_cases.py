"""Small float64 models and packed batches, with a run of each sequence alone as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knapformer.models import DiT, DiTConfig, MMDiT, MMDiTConfig, StreamIndex, local_attention

AXES = (4, 2, 2)


def dit(num_heads: int = 3, **changes: int) -> DiT:
    torch.manual_seed(0)
    config = DiTConfig(
        in_channels=5,
        conditioning_channels=6,
        num_heads=num_heads,
        head_width=8,
        rope_axes=AXES,
        num_blocks=2,
        **changes,
    )
    model = DiT(config).double()
    model.reset_parameters(init_std=0.3)
    return model


def mmdit(num_heads: int = 3, num_double_blocks: int = 2, num_single_blocks: int = 2, **changes: int) -> MMDiT:
    torch.manual_seed(0)
    config = MMDiTConfig(
        in_channels=5,
        text_channels=7,
        conditioning_channels=6,
        num_heads=num_heads,
        head_width=8,
        rope_axes=AXES,
        num_double_blocks=num_double_blocks,
        num_single_blocks=num_single_blocks,
        **changes,
    )
    model = MMDiT(config).double()
    model.reset_parameters(init_std=0.3)
    return model


@dataclass
class Sample:
    """One sequence: text (L_t, 7), visual (L_v, 5), position_ids (L_t + L_v, 3), conditioning (6,), weight (L_v, 5)."""

    text: Tensor
    visual: Tensor
    position_ids: Tensor
    conditioning: Tensor
    weight: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.text, self.visual, self.conditioning]


def samples(text: Sequence[int], visual: Sequence[int], seed: int = 1) -> list[Sample]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_()

    return [
        Sample(
            normal(num_text, 7),
            normal(num_visual, 5),
            torch.randint(0, 50, (num_text + num_visual, 3), generator=random),
            normal(6),
            normal(num_visual, 5).detach(),
        )
        for num_text, num_visual in zip(text, visual, strict=True)
    ]


def pack(batch: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, StreamIndex]:
    """The arguments of ``MMDiT.forward`` for a batch, possibly an empty one."""

    kind = batch[0].text.dtype if batch else torch.float64

    def join(parts: list[Tensor], *shape: int, dtype: torch.dtype = kind) -> Tensor:
        return torch.cat([torch.zeros(0, *shape, dtype=dtype), *parts])

    conditioning = join([s.conditioning[None] for s in batch], 6)
    if not batch:
        conditioning.requires_grad_()
    lengths = torch.tensor([len(s.position_ids) for s in batch], dtype=torch.int64)
    return (
        join([s.visual for s in batch], 5),
        join([s.text for s in batch], 7),
        join([s.position_ids for s in batch], 3, dtype=torch.int64),
        conditioning,
        torch.repeat_interleave(torch.arange(len(batch)), lengths),
        StreamIndex.from_lengths([len(s.text) for s in batch], [len(s.visual) for s in batch]),
    )


def run(
    model: torch.nn.Module, batch: Sequence[Sample], *, attention=None, change=lambda arguments: arguments
) -> Tensor:
    """The model's output (T_visual, 5) for a packed batch; a DiT sees the visual tokens only."""
    visual, text, position_ids, conditioning, sequence_index, streams = change(pack(batch))
    if isinstance(model, MMDiT):
        attention = attention or local_attention([len(s.position_ids) for s in batch])
        return model(visual, text, position_ids, conditioning, sequence_index, streams, attention=attention)
    attention = attention or local_attention([len(s.visual) for s in batch])
    position_ids, sequence_index = (x.index_select(0, streams.visual) for x in (position_ids, sequence_index))
    return model(visual, position_ids, conditioning, sequence_index, attention=attention)


def gradients(model: torch.nn.Module, batch: Sequence[Sample], output: Tensor) -> list[Tensor]:
    """Gradients of a fixed random functional of the output, for every parameter and input; None becomes zeros."""
    weight = torch.cat([torch.zeros(0, output.shape[1], dtype=output.dtype), *(s.weight for s in batch)])
    leaves = [*model.parameters(), *(leaf for s in batch for leaf in s.leaves)]
    found = torch.autograd.grad((output * weight).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def alone(model: torch.nn.Module, batch: Sequence[Sample]) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients where each sequence runs by itself."""
    outputs = [run(model, [s]) for s in batch]
    output = torch.cat(outputs) if outputs else torch.zeros(0, 5, dtype=torch.float64)
    return output, gradients(model, batch, output)


def error(value: Tensor, reference: Tensor) -> float:
    """‖Δ‖ / ‖reference‖; ‖Δ‖ alone where the reference is zero."""
    norm = float(reference.detach().norm())
    return float((value - reference).detach().norm()) / (norm or 1.0)


def largest_error(values: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    return max(error(v, r) for v, r in zip(values, references, strict=True))
