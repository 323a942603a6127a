"""What the demo trains: an MMDiT on packed samples, conditioned on which photograph they show, by flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from knapformer.demo.samples import (
    PHOTOGRAPHS,
    Album,
    SampleSpec,
    diffusion_time,
    noise,
    position_ids,
    text_embeddings,
)
from knapformer.models import MMDiT, MMDiTConfig, timestep_embedding
from knapformer.models.presets import PATCH_CHANNELS
from knapformer.training.losses import flow_matching_pair, reduce_loss, squared_error

if TYPE_CHECKING:
    from knapformer.step import Step


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One rank's samples of one step, as a data loader would bring them: packed, text first inside each sample.

    Attributes:
        text_lengths, visual_lengths: tokens of each sample.
        text: (T_text, text channels).
        noisy, target: (T_visual, 48).
        position_ids: (T, 3) int64.
        t: (S,) diffusion times.
        photograph: (S,) int64.
    """

    text_lengths: list[int]
    visual_lengths: list[int]
    text: Tensor
    noisy: Tensor
    target: Tensor
    position_ids: Tensor
    t: Tensor
    photograph: Tensor

    @classmethod
    def load(
        cls, specs: Sequence[SampleSpec], album: Album, *, text_channels: int, dtype: torch.dtype, device: torch.device
    ) -> Batch:
        """Read, crop and pack the samples; noise and times are drawn here, at home."""
        visual_lengths = [spec.visual_tokens for spec in specs]

        def join(parts: list[np.ndarray], width: int) -> Tensor:
            return torch.from_numpy(np.concatenate([np.zeros((0, width), parts[0].dtype if parts else float), *parts]))

        clean = join([album.tokens(spec) for spec in specs], PATCH_CHANNELS).to(dtype)
        t = torch.tensor([diffusion_time(spec) for spec in specs], dtype=dtype)
        token_t = t.repeat_interleave(torch.tensor(visual_lengths, dtype=torch.int64))
        noisy, target = flow_matching_pair(clean, join([noise(s) for s in specs], PATCH_CHANNELS).to(dtype), token_t)
        return cls(
            [spec.text_tokens for spec in specs],
            visual_lengths,
            join([text_embeddings(spec, text_channels) for spec in specs], text_channels).to(device, dtype),
            noisy.to(device),
            target.to(device),
            join([position_ids(spec) for spec in specs], 3).to(torch.int64).to(device),
            t.to(device),
            torch.tensor([spec.photograph for spec in specs], dtype=torch.int64, device=device),
        )

    @property
    def lengths(self) -> dict[str, list[int]]:
        """What ``Balancer.prepare`` takes."""
        return {"text": self.text_lengths, "visual": self.visual_lengths}


class Trainee(nn.Module):
    """An MMDiT and an embedding for each photograph. All that knows of ranks is the step that it is given."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.photographs = nn.Embedding(len(PHOTOGRAPHS), config.conditioning_channels)
        self.transformer = MMDiT(config)

    @property
    def blocks(self) -> list[nn.Module]:
        """The transformer's blocks, for ``knapformer.training.parallel``."""
        return self.transformer.blocks

    def forward(self, batch: Batch, step: Step) -> Tensor:
        """(T_visual,) squared error of the velocity of the batch's own tokens, in their order, whoever computes it."""
        dtype = self.photographs.weight.dtype  # under mixed precision that of computing, and not of the batch
        times = timestep_embedding(batch.t, self.photographs.embedding_dim)
        routed = step.route_batch(
            tokens=[batch.position_ids],
            streams={"visual": [batch.noisy.to(dtype)], "text": [batch.text.to(dtype)]},
            conditioning=[self.photographs(batch.photograph) + times.to(dtype)],
        )
        prediction = self.transformer(
            *routed.streams["visual"],
            *routed.streams["text"],
            *routed.tokens,
            *routed.conditioning,
            step.sequence_index,
            step.streams,
            attention=step.attention,
        )
        return squared_error(step.restore(prediction, stream="visual"), batch.target)


def sample_mean_loss(errors: Tensor, batch: Batch, num_samples: int, world_size: int) -> Tensor:
    """This rank's part of the mean over all ranks' samples; averaging gradients over ranks makes it whole.

    Args:
        errors: (T_visual,), at home.
        batch: this rank's samples.
        num_samples: of all ranks.
        world_size: ranks over which gradients are averaged.
    """
    return reduce_loss(
        errors, reduction="sample_mean", lengths=batch.visual_lengths, num_samples=num_samples, world_size=world_size
    )
