"""FSDP2 and activation checkpointing, applied to a model from outside.

Both find the transformer blocks as ``model.blocks`` and change neither the model's code nor its state dict's keys.
Where both are wanted, ``checkpoint`` comes first and ``shard`` second: FSDP2's hooks then surround the recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint as run_checkpointed

from knapformer.errors import ConfigurationError

MESH_NAMES = ("replicate", "shard")


def shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    shard_size: int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Shard parameters, gradients and optimizer state with FSDP2: each block on its own, the root with the rest.

    Every rank of the mesh must call it, and must run forward and backward in every step, with or without tokens.
    Gradients are AVERAGED over all ranks of the mesh (``knapformer.training.losses`` has the loss that suits).

    Args:
        model: has ``blocks``. Changed in place.
        mesh: of one dimension (shard) or two (replicate, shard). By default one over all ranks of the default group.
        shard_size: ranks over which one copy of the parameters is sharded; below the world size, copies are replicated
            (HSDP). Consecutive ranks share a copy. By default the world size.
        mp_policy: FSDP2's mixed precision; its ``output_dtype`` is that of the model's output, not of the blocks'.
        reshard_after_forward: free a block's gathered parameters between its forward and its backward pass.

    Returns:
        ``model``.

    Raises:
        ConfigurationError: mesh and shard_size are both given, shard_size does not divide the world size, or parameters
            are on several devices or on none.
    """
    if mesh is not None and shard_size is not None:
        raise ConfigurationError(f"give mesh or shard_size, not both, got a mesh and shard_size {shard_size}")
    blocks = _blocks(model)
    mesh = _make_mesh(_device_type(model), shard_size) if mesh is None else mesh
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    # If blocks cast their outputs too, the root's last layers would meet tokens of another dtype than their weights.
    block_policy = replace(policy, output_dtype=None)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=block_policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # backward begins with the root
    return model


def checkpoint(model: nn.Module, *, what: Literal["block", "attention"] = "block") -> nn.Module:
    """Recompute activations in backward instead of keeping them (non-reentrant checkpointing).

    Args:
        model: has ``blocks``, and takes ``attention`` as a keyword argument. Changed in place; parameters, module tree
            and state dict are not.
        what: ``"block"`` recomputes whole blocks; ``"attention"`` only the attention call, exchanges included, so that
            full-length q, k and v are not kept.

    Returns:
        ``model``.

    Raises:
        ConfigurationError: an unknown ``what``, a model without blocks, or one that is checkpointed already.
    """
    if what not in ("block", "attention"):
        raise ConfigurationError(f"what must be 'block' or 'attention', got {what!r}")
    blocks = _blocks(model)
    if _is_checkpointed(model, blocks):
        raise ConfigurationError(f"{type(model).__name__} is checkpointed already")
    if what == "attention":
        model.register_forward_pre_hook(_checkpoint_attention, with_kwargs=True)
        return model
    for block in blocks:
        # On the instance: a wrapper module would change the state dict's keys. A partial of the bound method, unlike a
        # closure, follows the block when the model is deep-copied.
        block.forward = functools.partial(_recomputed, block.forward)
    return model


def checkpointed(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An attention that keeps q, k and v as they are passed, and recomputes the rest in backward."""
    return functools.partial(run_checkpointed, attention, use_reentrant=False)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function of our own around torch's, because a compiler looks into it; where a block is compiled, it recomputes
    in the compiled backward."""
    return run_checkpointed(forward, *args, use_reentrant=False, **kwargs)


def _checkpoint_attention(
    _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if "attention" in kwargs:
        kwargs = {**kwargs, "attention": checkpointed(kwargs["attention"])}
    return args, kwargs


def _is_checkpointed(model: nn.Module, blocks: list[nn.Module]) -> bool:
    forwards = (block.__dict__.get("forward") for block in blocks)
    on_blocks = any(isinstance(f, functools.partial) and f.func is _recomputed for f in forwards)
    return on_blocks or _checkpoint_attention in model._forward_pre_hooks.values()


def _blocks(model: nn.Module) -> list[nn.Module]:
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, Iterable):
        raise ConfigurationError(f"{type(model).__name__} needs an attribute blocks that lists its transformer blocks")
    return list(blocks)


def _device_type(model: nn.Module) -> str:
    types = sorted({parameter.device.type for parameter in model.parameters()})
    if len(types) != 1 or types == ["meta"]:
        raise ConfigurationError(f"without a mesh, all parameters must be on one type of device, got {types}")
    return types[0]


def _make_mesh(device_type: str, shard_size: int | None) -> DeviceMesh:
    world_size = dist.get_world_size()
    shard_size = world_size if shard_size is None else shard_size
    if isinstance(shard_size, bool) or not isinstance(shard_size, int) or shard_size < 1 or world_size % shard_size:
        raise ConfigurationError(f"shard_size must divide the world size {world_size}, got {shard_size!r}")
    if shard_size == world_size:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=MESH_NAMES[1:])
    return init_device_mesh(device_type, (world_size // shard_size, shard_size), mesh_dim_names=MESH_NAMES)
