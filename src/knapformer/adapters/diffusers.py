"""Balance an existing transformer of diffusers: patch the forwards of its instance, and undo it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

from torch import Tensor, nn

from knapformer.adapters.calls import Call
from knapformer.adapters.family import Family, check_sources, check_structure
from knapformer.adapters.packing import Batch
from knapformer.adapters.wrappers import check_own_forward, reaches, unwrapped
from knapformer.errors import ConfigurationError
from knapformer.execution.compiling import any_number_of_rows, refuse_whole_model
from knapformer.given.cost import CostModel

FAMILIES = {
    "FluxTransformer2DModel": "knapformer.adapters.flux",
    "WanTransformer3DModel": "knapformer.adapters.wan",
    "QwenImageTransformer2DModel": "knapformer.adapters.qwen_image",
    "SD3Transformer2DModel": "knapformer.adapters.sd3",
    "HunyuanVideoTransformer3DModel": "knapformer.adapters.hunyuan_video",
}
"""Which module adapts which class."""

STATE = "_knapformer"
"""Attribute of a balanced transformer that holds its ``Balanced``."""


@dataclass(frozen=True, slots=True, eq=False)
class Balanced:
    """What ``balance`` did to a transformer."""

    family: Family
    balancer: Any
    keep_padding: bool

    def __deepcopy__(self, _memo: Any) -> Balanced:
        # An EMA copy of the model is balanced by the same balancer; process groups cannot be copied.
        return self


def balance(transformer: Any, balancer: Any, *, keep_padding: bool = False, check_sources: bool = True) -> Any:
    """Make a transformer of diffusers run packed and balanced, in place.

    Its forward then takes the same arguments in the same order, each batched as before or as a list of per-sample
    tensors without the batch dimension: variable resolutions, frames and real text lengths in one batch. ``sample`` of
    its output is batched where ``hidden_states`` is, else a list, and ``rows`` has the same values packed, with a graph
    even where a rank has no sample.
    Every rank of the balancing group calls forward and backward in every step, with or without samples.

    It may be called before or after ``fully_shard``, before or after adapters are added with peft. Parameters, buffers,
    submodules and state dict stay as they are.

    Args:
        transformer: of a class in ``FAMILIES``, pretrained or not, or a DDP, FSDP1, ``torch.compile`` or peft module
            around one.
        balancer: a ``knapformer.Balancer``; see ``cost_of`` for its cost model.
        keep_padding: keep the text's padding tokens, as the family's pretrained weights expect. By default tokens that
            ``encoder_attention_mask`` excludes are dropped. Only for families that attend to padding.
        check_sources: compare the functions of diffusers that the adapter restates with those of the tested version.

    Returns:
        ``transformer``.

    Raises:
        ConfigurationError: no adapter for this class or configuration, a diffusers that does not match it, or a
            transformer whose forward something else has replaced.
    """
    whole, transformer = transformer, unwrapped(transformer)
    family = family_of(transformer)
    version = diffusers_version()
    if STATE in transformer.__dict__:
        raise ConfigurationError(f"{type(transformer).__name__} is balanced already; call unbalance() first")
    if keep_padding and not family.attends_to_padding:
        raise ConfigurationError(
            f"keep_padding=True: {family.model.__name__} masks padding, so that no token attends to it either way"
        )
    if check_sources:
        _check_sources(family, version)
    check_structure(family, transformer, version)
    _put_on(transformer, Balanced(family, balancer, keep_padding))
    return whole


def unbalance(transformer: Any) -> Any:
    """Undo ``balance``.

    Returns:
        ``transformer``, which runs as diffusers made it.

    Raises:
        ConfigurationError: it is not balanced, or something has replaced a forward since. accelerate's mixed precision
            may stay around it.
    """
    _take_off(unwrapped(transformer))
    return transformer


@contextlib.contextmanager
def unbalanced(transformer: Any) -> Iterator[Any]:
    """Inside it the transformer runs as diffusers made it, on this rank alone: for validation and sampling in training.

    It is no collective, and neither is a forward of the transformer inside it: the main process may sample while the
    others wait. With sharded parameters (FSDP) forward gathers them, and then every rank must call it.

    Args:
        transformer: balanced; wrapped or not.

    Yields:
        The transformer without wrappers, for a pipeline of diffusers.

    Raises:
        ConfigurationError: as ``unbalance``.
    """
    inner = unwrapped(transformer)
    state = _take_off(inner)
    try:
        yield inner
    finally:
        _put_on(inner, state)


def prepare(transformer: Any, *inputs: Any, **named_inputs: Any) -> Any:
    """Plan a step ahead from the inputs of forward; every rank of the group calls it.

    Args:
        transformer: balanced.
        inputs, named_inputs: as for its forward. Only shapes and masks are looked at.

    Returns:
        The step, to be passed to forward as ``step=``. It may serve several models of equal patch size.

    Raises:
        RankError: on every rank, if the inputs of one are no inputs of this model, naming it and its error.
    """
    transformer = unwrapped(transformer)
    state = _state_of(transformer)
    return _open(transformer, state, inputs, named_inputs, None)[2]


def cost_of(transformer: Any, **overrides: Any) -> CostModel:
    """The cost model of a transformer from its configuration; anything else (gamma, machine, …) by keyword."""
    transformer = unwrapped(transformer)
    return replace(family_of(transformer).cost(transformer.config), **overrides)


def family_of(transformer: Any) -> Family:
    """The adapter of a transformer's class.

    Raises:
        ConfigurationError: there is none, or diffusers lacks a name that it needs.
    """
    names = [cls.__name__ for cls in type(transformer).__mro__]
    name = next((name for name in names if name in FAMILIES), None)
    if name is None or not isinstance(transformer, nn.Module):
        raise ConfigurationError(f"no adapter for {names[0]}; there is one for {', '.join(FAMILIES)}")
    version = diffusers_version()
    try:
        family: Family = importlib.import_module(FAMILIES[name]).FAMILY
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"the adapter of {name} does not fit diffusers {version}: {error}") from error
    return family


def diffusers_version() -> str:
    """The installed version.

    Raises:
        ConfigurationError: diffusers is not installed.
    """
    try:
        return str(importlib.import_module("diffusers").__version__)
    except ImportError as error:
        raise ConfigurationError(
            f"diffusers cannot be imported ({error}): pip install knapformer[diffusers]"
        ) from error


_check_sources = check_sources


def _patches(transformer: nn.Module, family: Family) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """The modules that get another forward, and which."""
    found = ((module, family.layer_of(module)) for module in transformer.modules())
    return [(transformer, _forward), *((module, layer.forward) for module, layer in found if layer is not None)]


def _put_on(transformer: nn.Module, state: Balanced) -> None:
    """Replace the forwards, those of layers that were added since too.

    Raises:
        ConfigurationError: something has replaced one already.
    """
    patches = [patch for patch in _patches(transformer, state.family) if not _is_ours_inside(*patch)]
    for module, _ in patches:
        check_own_forward(module)
    for module, forward in patches:
        # On the instance, as a bound method, which follows the module when the model is deep-copied.
        module.forward = MethodType(forward, module)
    transformer.__dict__[STATE] = state


def _take_off(transformer: Any) -> Balanced:
    """Give the modules their own forwards back.

    Raises:
        ConfigurationError: not balanced, or something has replaced a forward since.
    """
    state = _state_of(transformer)
    # Layers that were added since, by peft, have no forward of their own.
    patches = [patch for patch in _patches(transformer, state.family) if "forward" in patch[0].__dict__]
    patches = [patch for patch in patches if not _is_ours_inside(*patch)]
    for module, forward in patches:
        if getattr(module.forward, "__func__", None) is not forward:
            raise ConfigurationError(f"the forward of a {type(module).__name__} was replaced after balance()")
    for module, _ in patches:
        del module.__dict__["forward"]
    del transformer.__dict__[STATE]
    return state


def _is_ours_inside(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether accelerate's wrapper holds on to the whole transformer's ``_forward``; that sees by itself what to do."""
    own = module.__dict__.get("forward")
    return forward is _forward and getattr(own, "__func__", None) is not forward and reaches(own, forward)


def _state_of(transformer: Any) -> Balanced:
    state = getattr(transformer, "__dict__", {}).get(STATE)
    if state is None:
        raise ConfigurationError(f"{type(transformer).__name__} is not balanced; call balance() first")
    checked: Balanced = state
    return checked


def _forward(self: Any, *inputs: Any, step: Any = None, **named_inputs: Any) -> Any:
    """Forward of a balanced transformer; every rank of the group calls it."""
    if STATE not in self.__dict__:  # unbalanced, under a wrapper that holds on to this forward
        return type(self).forward(self, *inputs, **named_inputs)
    state = _state_of(self)
    refuse_whole_model(type(self).__name__, _compile_line(self))
    call, batch, step = _open(self, state, inputs, named_inputs, step)
    with any_number_of_rows():
        rows: Tensor = state.family.compute(self, batch, step)
    rows = step.restore(rows) if state.family.stream is None else step.restore(rows, stream=state.family.stream)
    return call.output(rows, batch, self.config, step, state.family.stream)


def _compile_line(transformer: Any) -> str:
    """What compiles its blocks; diffusers has a method where the class names them."""
    if getattr(transformer, "_repeated_blocks", None):
        return "transformer.compile_repeated_blocks(fullgraph=True, dynamic=True)"
    return "for block in transformer.transformer_blocks: block.compile(fullgraph=True, dynamic=True)"


def _open(transformer: Any, state: Balanced, inputs: Any, named_inputs: Any, step: Any) -> tuple[Call, Batch, Any]:
    """Pack the inputs and plan the step. An error in packing is raised on all ranks, unless a step is given."""
    family, balancer = state.family, state.balancer
    try:
        call = Call.of(family, inputs, named_inputs)
        batch = family.pack(transformer, state.keep_padding, **call.arguments)
    except Exception as error:
        if step is None:
            balancer.prepare(family.empty_lengths, error=error)
        raise
    if step is None:
        step = balancer.prepare(batch.lengths, conditioning=dict(batch.conditioning) or None)
    else:
        step.check_lengths(batch.lengths, conditioning=batch.conditioning)
    return call, batch, step
