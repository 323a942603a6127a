"""Per-sample tensors to packed rows and back, and what the packed forwards share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from knapformer.adapters.dispatched import check_not_cut
from knapformer.errors import ConfigurationError, LengthsError
from knapformer.execution.compiling import any_number_of_rows
from knapformer.execution.devices import to_device
from knapformer.execution.local_attention import LocalAttention
from knapformer.execution.rows import RowIndex
from knapformer.models import StreamIndex

Rotate = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One rank's samples as packed rows, before any collective.

    Attributes:
        lengths: what ``Balancer.prepare`` takes: tokens per sample, or a mapping of streams.
        tensors: packed tensors by name.
        unpack: rows at home (T_home, C), sample after sample, to per-sample tensors in diffusers' layout.
        conditioning: ragged conditioning that ``prepare`` declares: rows per sample by name.
    """

    lengths: Any
    tensors: Mapping[str, Tensor]
    unpack: Callable[[Tensor], list[Tensor]]
    conditioning: Mapping[str, list[int]] = field(default_factory=dict)


class Packed:
    """What every block of one forward pass needs to know about its packed tokens.

    A plain class, because FSDP2 walks a module's inputs and casts the floating-point tensors that it finds: the
    rotation stays in full precision in here.

    Attributes:
        step: the balancing step.
        index: packed tokens (T,) to the row of their sequence's conditioning.
        streams: packed rows of text and visual tokens; None for models without text tokens.
        text: the same for the text tokens (T_text,).
        visual: the same for the visual tokens (T_visual,); it may point past the sequences' own rows.
        rotate: (T, H, D) queries or keys to rotated ones; None where the model does not rotate.
        num_sequences: conditioning rows of the sequences themselves.
        visual_attention: of each sequence's visual tokens among themselves; None where a plan splits any sequence, on
            all ranks alike.
        contexts: cross-attention of each local sequence's tokens to its context, by name.
    """

    __slots__ = (
        "contexts",
        "index",
        "num_sequences",
        "rotate",
        "step",
        "streams",
        "text",
        "visual",
        "visual_attention",
    )

    def __init__(self, step: Any, *, rotate: Rotate | None = None, has_streams: bool = True) -> None:
        self.step = step
        self.index: RowIndex = step.row_index
        self.rotate = rotate
        self.num_sequences = len(step.local_lengths)
        self.streams: StreamIndex | None = step.streams if has_streams else None
        self.text, self.visual = (
            (self.index, self.index) if self.streams is None else self.streams.split_rows(self.index)
        )
        self.visual_attention: LocalAttention | None = None
        self.contexts: dict[str, LocalAttention] = {}

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v (T, H, D) of packed tokens, rotated where the model rotates, to (T, H·D)."""
        if self.rotate is not None:
            q, k = self.rotate(q), self.rotate(k)
        # Under autocast, norms give float32 and projections half precision.
        out: Tensor = self.step.attention(q.to(v.dtype), k.to(v.dtype), v)
        return out.flatten(1)

    def merge(self, text: Tensor, visual: Tensor) -> Tensor:
        """(T_text, …) and (T_visual, …) to (T, …)."""
        assert self.streams is not None
        return self.streams.merge(text, visual)

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """(T, …) to (T_text, …) and (T_visual, …)."""
        assert self.streams is not None
        return self.streams.split(packed)


def float_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which a model's floating-point inputs are routed: that of its parameters.

    A rank without samples cannot see it in its inputs, and receives other ranks' rows all the same.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    raise ConfigurationError(f"{type(model).__name__} has no floating-point parameter")


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters, where its rows are packed."""
    return next(model.parameters()).device


def samples(
    name: str, values: Any, ndim: int, layout: str, num_samples: int | None = None, *, is_shareable: bool = False
) -> list[Tensor]:
    """Per-sample tensors, given as a list of them or as one tensor with a batch dimension.

    Args:
        num_samples: of ``hidden_states``, where that is another input.
        is_shareable: a tensor without a batch dimension is that of every sample.

    Raises:
        ConfigurationError: neither a list of ``ndim``-dimensional tensors nor a tensor of one more dimension, or a list
            of tensors that accelerate's loader has cut.
        LengthsError: of another number of samples than ``hidden_states``.
    """
    if isinstance(values, Tensor) and values.ndim == ndim + 1:
        values = list(values.unbind(0))
    elif isinstance(values, Tensor) and values.ndim == ndim and is_shareable and num_samples is not None:
        values = [values] * num_samples
    if isinstance(values, Tensor) or not isinstance(values, Sequence):
        shape = f" of shape {tuple(values.shape)}" if isinstance(values, Tensor) else ""
        raise ConfigurationError(
            f"{name}: a balanced model takes a list of per-sample tensors {layout}, or one tensor with a batch "
            f"dimension before these, got {type(values).__name__}{shape}"
        )
    for i, value in enumerate(values):
        if not isinstance(value, Tensor) or value.ndim != ndim:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigurationError(f"{name}[{i}]: expected a tensor {layout}, got {found}")
    check_not_cut(name, values)
    if num_samples is not None and len(values) != num_samples:
        raise LengthsError(f"{name} has {len(values)} samples, hidden_states {num_samples}")
    return list(values)


def stack_rows(name: str, rows: Sequence[Tensor], width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows (L_i, width) of all samples, one after another: (ΣL_i, width), with no sample too."""
    for i, part in enumerate(rows):
        if part.shape[1] != width:
            raise ConfigurationError(f"{name}[{i}]: the model takes {width} channels, got {part.shape[1]}")
    empty = torch.empty(0, width, dtype=dtype, device=device)
    return torch.cat([empty, *(to_device(part, device).to(dtype) for part in rows)])


def stack_ids(
    name: str, ids: Sequence[Tensor], width: int, device: torch.device, lengths: Sequence[int], rows_of: str
) -> Tensor:
    """Position ids (L_i, width) of all samples as integers, which travel exactly.

    Args:
        lengths: tokens L_i of each sample.
        rows_of: the input that has these tokens, for the error.

    Raises:
        LengthsError: a sample has other numbers of ids than of tokens.
        ConfigurationError: an id is no whole number, or may have been rounded to one: mixed precision casts what a
            model is called with. Integer ids are not looked at, so that no device is waited for.
    """
    for i, part in enumerate(ids):
        if part.shape[1] != width:
            raise ConfigurationError(f"{name}[{i}]: expected {width} ids per token, got {part.shape[1]}")
        if len(part) != lengths[i]:
            raise LengthsError(f"{name}[{i}] has ids of {len(part)} tokens, {rows_of}[{i}] {lengths[i]} tokens")
        if part.is_floating_point():
            _check_whole(f"{name}[{i}]", part)
    empty = torch.empty(0, width, dtype=torch.int64, device=device)
    return torch.cat([empty, *(to_device(part, device).to(torch.int64) for part in ids)])


def _check_whole(name: str, ids: Tensor) -> None:
    if bool((ids != ids.round()).any()):
        raise ConfigurationError(f"{name}: position ids must be whole numbers, got {ids.dtype} fractions")
    exact = 2 / torch.finfo(ids.dtype).eps
    if ids.numel() and float(ids.abs().max()) >= exact:
        raise ConfigurationError(
            f"{name}: position ids must be integers, or stay below {exact:.0f} in {ids.dtype}, which rounds them; "
            f"got {float(ids.abs().max()):.0f}"
        )


def stack_vectors(
    name: str, values: Any, num_samples: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """One value (``width`` 1) or vector per sample, as a tensor or a list, to (num_samples, width).

    A tensor of a single one is that of every sample, as in diffusers.
    """
    if not isinstance(values, Tensor):
        if not isinstance(values, Sequence):
            raise ConfigurationError(f"{name}: expected one value per sample, got {values!r}")
        parts = [torch.as_tensor(value).reshape(-1) for value in values]
        values = torch.stack(parts) if parts else torch.empty(0, width)
    elif values.shape[:1] == (1,) and values.numel() == width:
        values = values.expand(num_samples, *values.shape[1:])
    if values.shape[:1] != (num_samples,) or values.numel() != num_samples * width:
        what = f"{width} channels" if width > 1 else "one value"
        raise LengthsError(f"{name}: expected {what} for each of {num_samples} samples, got {tuple(values.shape)}")
    return to_device(values, device).to(dtype).reshape(num_samples, width)


def real_text(text: Sequence[Tensor], mask: Any, keep_padding: bool) -> list[Tensor]:
    """Per-sample text (L, C) without the rows that ``mask`` (one (L,) tensor per sample) calls padding."""
    if mask is None or keep_padding:
        return list(text)
    masks = samples("encoder_attention_mask", list(mask), 1, "(L,)", len(text))
    for i, (part, keep) in enumerate(zip(text, masks, strict=True)):
        if len(part) != len(keep):
            raise LengthsError(f"encoder_attention_mask[{i}] has {len(keep)} entries, its text {len(part)} rows")
    return [part[keep.to(part.device, torch.bool)] for part, keep in zip(text, masks, strict=True)]


def patchify(latent: Tensor, patch: Sequence[int], name: str) -> Tensor:
    """(C, *sizes) to (tokens, C, *patch), in the order of the patch grid.

    Raises:
        LengthsError: a size is no multiple of the patch.
    """
    sizes = latent.shape[1:]
    if any(size % p for size, p in zip(sizes, patch, strict=True)):
        raise LengthsError(f"{name}: sizes {tuple(sizes)} are no multiples of the patch {tuple(patch)}")
    num_axes = len(patch)
    for axis, p in enumerate(patch):
        latent = latent.unflatten(1 + 2 * axis, (-1, p))
    grid, inner = range(1, 2 * num_axes, 2), range(2, 2 * num_axes + 1, 2)
    return latent.permute(*grid, 0, *inner).flatten(0, num_axes - 1)


def grid_ids(grid: Sequence[int], device: torch.device) -> Tensor:
    """(tokens, axes) int64 coordinates of a patch grid, last axis fastest."""
    axes = [torch.arange(size, device=device) for size in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, len(axes))


def run_block(model: Any, block: nn.Module, *args: Any) -> Any:
    """Call a block, through diffusers' gradient checkpointing where the model has it enabled."""
    if torch.is_grad_enabled() and model.gradient_checkpointing:
        return model._gradient_checkpointing_func(functools.partial(_for_any_rows, block), *args)
    return block(*args)


def _for_any_rows(block: nn.Module, *args: Any) -> Any:
    """In backward too, where it runs a second time: a graph of its own for 0 rows would keep other tensors."""
    with any_number_of_rows():
        return block(*args)
