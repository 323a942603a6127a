"""Diffusion Transformers on packed tokens. They take ``attention`` as an argument and know nothing of ranks.

Imports ``given``, ``streams`` and what of ``execution`` issues no collective.
"""

from knapformer.models.config import DIT_PRESETS, MMDIT_PRESETS, DiTConfig, MMDiTConfig
from knapformer.models.dit import DiT
from knapformer.models.layers import Attention, timestep_embedding
from knapformer.models.local import local_attention
from knapformer.models.mmdit import MMDiT
from knapformer.streams import StreamIndex

__all__ = [
    "DIT_PRESETS",
    "MMDIT_PRESETS",
    "Attention",
    "DiT",
    "DiTConfig",
    "MMDiT",
    "MMDiTConfig",
    "StreamIndex",
    "local_attention",
    "timestep_embedding",
]
