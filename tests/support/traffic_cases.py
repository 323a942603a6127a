"""What the operators of a forward and backward pass read and write, counted as they are dispatched; and models of every
family, wide enough that their tokens are most of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from family_cases import image_ids, randomized
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorBytes(TorchDispatchMode):
    """Counts bytes that operators read and write, and how often each is called.

    A view costs nothing. An expanded tensor is read once. An operator that writes into a tensor it was given reads as
    much of that as its other arguments say, so the tensor counts as written only.

    Attributes:
        bytes_of: by operator.
        calls: by operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes_of: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.bytes_of.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        self.calls[name] += 1
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in given}
        is_view = not func._schema.is_mutable and made and all(x.untyped_storage().data_ptr() in storages for x in made)
        if not is_view and "empty" not in name:
            written = {id(x) for x in made}
            read = [] if "new_" in name or "zeros_like" in name else [x for x in given if id(x) not in written]
            self.bytes_of[name] += sum(map(distinct_bytes, [*read, *made]))
        return out


def distinct_bytes(x: Tensor) -> int:
    """Bytes of the elements of ``x``; those that are expanded count once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count * x.element_size()


WIDTH, TEXT_WIDTH, NUM_TEXT, SIDE = 256, 64, 64, 24
"""Of the models; text rows, and tokens a side of each image."""


def build(name: str) -> Any:
    """A random model in float32."""
    heads = {"attention_head_dim": 64, "num_attention_heads": WIDTH // 64}
    joint = heads | {"num_layers": 1, "joint_attention_dim": TEXT_WIDTH}
    stable = joint | {
        "sample_size": 64, "patch_size": 2, "in_channels": 16, "out_channels": 16, "caption_projection_dim": WIDTH,
        "pooled_projection_dim": 64, "pos_embed_max_size": 128, "qk_norm": "rms_norm", "num_layers": 2,
    }  # fmt: skip
    makers: dict[str, Callable[[], Any]] = {
        "flux": lambda: diffusers.FluxTransformer2DModel(
            in_channels=16, num_single_layers=2, pooled_projection_dim=64, guidance_embeds=True,
            axes_dims_rope=(16, 24, 24), **joint,
        ),
        "wan": lambda: diffusers.WanTransformer3DModel(
            in_channels=16, out_channels=16, text_dim=TEXT_WIDTH, freq_dim=64, ffn_dim=4 * WIDTH, num_layers=2,
            rope_max_seq_len=64, **heads,
        ),
        "qwen-image": lambda: diffusers.QwenImageTransformer2DModel(
            patch_size=2, in_channels=64, out_channels=16, axes_dims_rope=(16, 24, 24), **joint,
        ),
        "sd3": lambda: diffusers.SD3Transformer2DModel(**stable),
        "sd3.5": lambda: diffusers.SD3Transformer2DModel(dual_attention_layers=(0, 1), **stable),
        "hunyuan-video": lambda: diffusers.HunyuanVideoTransformer3DModel(
            in_channels=16, out_channels=16, num_layers=1, num_single_layers=2, num_refiner_layers=1, patch_size=2,
            patch_size_t=1, guidance_embeds=True, text_embed_dim=TEXT_WIDTH, pooled_projection_dim=64,
            rope_axes_dim=(16, 24, 24), **heads,
        ),
    }  # fmt: skip
    return randomized(makers[name](), 1).float()


def sample(name: str, side: int = SIDE) -> dict[str, Any]:
    """One image of ``side`` × ``side`` tokens with its text, without batch dimension."""
    generator = torch.Generator().manual_seed(side)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    time, num_tokens = torch.tensor(0.5), side * side
    pooled = {"pooled_projections": draw(64)}
    given = {"encoder_hidden_states": draw(NUM_TEXT, TEXT_WIDTH)}
    if name == "flux":
        ids = {"img_ids": image_ids(side, side), "txt_ids": torch.zeros(NUM_TEXT, 3, dtype=torch.int64)}
        return given | pooled | ids | {"hidden_states": draw(num_tokens, 16), "timestep": time, "guidance": time}
    if name == "qwen-image":
        shapes = [(1, side, side)]
        return given | {"hidden_states": draw(num_tokens, 64), "timestep": time, "img_shapes": shapes}
    latent = draw(16, 2 * side, 2 * side)
    if name.startswith("sd3"):
        return given | pooled | {"hidden_states": latent, "timestep": 1000 * time}
    given |= {"hidden_states": latent.unsqueeze(1), "timestep": 1000 * time}
    if name == "wan":
        return given
    return given | pooled | {"encoder_attention_mask": torch.ones(NUM_TEXT), "guidance": 1000 * time}


def batched(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """What diffusers takes for equal samples; ids are shared, and shapes are listed per sample."""
    found = {key: [given[key] for given in samples] for key in samples[0]}
    return {
        key: values[0] if key in ("img_ids", "txt_ids") else values if key == "img_shapes" else torch.stack(values)
        for key, values in found.items()
    }
