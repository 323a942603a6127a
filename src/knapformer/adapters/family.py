"""What the adapter of one model family consists of, and the check that the installed diffusers still matches it."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import linecache
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from knapformer.adapters.fingerprints import FINGERPRINTS, TESTED_VERSION
from knapformer.adapters.packing import Batch
from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel


@dataclass(frozen=True, slots=True)
class Layer:
    """A class of modules that gets a packed forward.

    Attributes:
        cls: diffusers' class.
        forward: the packed forward, a function of the module and packed tensors.
        members: submodules and parameters that the packed forward uses.
    """

    cls: type[nn.Module]
    forward: Callable[..., Any]
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    Attributes:
        model: diffusers' class of the whole transformer.
        layers: the modules inside it that get a packed forward.
        members: submodules and parameters of the transformer that ``compute`` uses.
        sources: functions of diffusers that the packed forwards restate; with the layers' and the model's forwards they
            are compared with the tested version.
        processors: attention processors whose work the packed forwards do.
        pack: (model, keep_padding, *inputs in diffusers' order) to a ``Batch``, locally.
        compute: (model, batch, step) to the output rows on this rank; every rank calls it.
        cost: of a layer, from the configuration.
        stream: the stream of the output rows; None for models without text tokens.
        attends_to_padding: diffusers' pipelines let the tokens attend to padded text, as in pretraining.
        check: refuses configurations that the adapter does not know.
    """

    model: type[nn.Module]
    layers: tuple[Layer, ...]
    members: tuple[str, ...]
    sources: tuple[Callable[..., Any], ...]
    processors: tuple[type, ...]
    pack: Callable[..., Batch]
    compute: Callable[..., Tensor]
    cost: Callable[[Any], CostModel]
    stream: str | None
    attends_to_padding: bool
    check: Callable[[Any], None] = lambda model: None

    @property
    def empty_lengths(self) -> Any:
        """The lengths of a rank without samples."""
        return [] if self.stream is None else {"text": [], "visual": []}

    def layer_of(self, module: nn.Module) -> Layer | None:
        """The entry of a module's class; FSDP2 and parametrizations subclass it."""
        return next((layer for layer in self.layers if isinstance(module, layer.cls)), None)


def layer_cost(config: Any, num_layers: int, linear_flops_per_token: float, num_attentions: float = 1.0) -> CostModel:
    """The cost model of a layer of ``config``'s width.

    Args:
        num_attentions: attentions over the whole sequence in a layer, on average.
    """
    width = config.num_attention_heads * config.attention_head_dim
    return CostModel(
        hidden=width,
        num_heads=config.num_attention_heads,
        linear_flops_per_token=linear_flops_per_token,
        attention_flops_per_pair=4.0 * width * num_attentions,
        num_layers=num_layers,
    )


def fingerprint(function: Callable[..., Any]) -> str:
    """Of a function's source from its ``def`` on, without comments and white space."""
    code = inspect.unwrap(function).__code__
    # inspect.getsource would tokenize: 0.3 s for a family.
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
    indent = _indent(lines[start])
    rest = itertools.takewhile(lambda line: not _ends_block(line, indent), lines[start + 1 :])
    source = "".join([lines[start], *rest])
    return hashlib.sha256(re.sub(r"#[^\n]*|\s+", "", source).encode()).hexdigest()[:16]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _ends_block(line: str, indent: int) -> bool:
    """Whether a line lies outside the function; a signature may close at the indent of its ``def``."""
    return bool(line.strip()) and _indent(line) <= indent and not line.lstrip().startswith(")")


def source_name(function: Callable[..., Any]) -> str:
    """Where in ``diffusers.models`` a function is defined: the key of its fingerprint."""
    function = inspect.unwrap(function)
    return f"{function.__module__.removeprefix('diffusers.models.')}.{function.__qualname__}"


def restated_sources(family: Family) -> list[Callable[..., Any]]:
    """Every function of diffusers whose work the family's packed forwards do."""
    forwards = [cls.forward for cls in (family.model, *(layer.cls for layer in family.layers)) if _is_diffusers(cls)]
    return [*forwards, *family.sources, *(processor.__call__ for processor in family.processors)]


def check_sources(family: Family, version: str, known: Mapping[str, str] = FINGERPRINTS) -> None:
    """Compare the functions that the adapter restates with those of the tested diffusers.

    Raises:
        ConfigurationError: naming the functions that changed, and both versions.
    """
    changed = [source_name(f) for f in restated_sources(family) if known.get(source_name(f)) != fingerprint(f)]
    if changed:
        raise ConfigurationError(
            f"diffusers {version} does not compute {family.model.__name__} as diffusers {TESTED_VERSION} does, with "
            f"which this adapter was proven; changed: {', '.join(changed)}. Install diffusers=={TESTED_VERSION}, or "
            "pass check_sources=False and prove equality yourself (docs/equality.md)"
        )


def check_structure(family: Family, model: nn.Module, version: str) -> None:
    """Check that a model consists of what the packed forwards use.

    Raises:
        ConfigurationError: naming the module, what it lacks, and the versions.
    """
    wanted = [("the transformer", model, family.members)]
    found: set[type] = set()
    for name, module in model.named_modules():
        layer = family.layer_of(module)
        if layer is not None:
            found.add(layer.cls)
            wanted.append((name, module, layer.members))
        processor = getattr(module, "processor", None)
        if processor is not None and not isinstance(processor, family.processors):
            raise ConfigurationError(
                f"{name} has the attention processor {type(processor).__name__}; a balanced model takes the place of "
                f"{', '.join(p.__name__ for p in family.processors)} only"
            )
        if getattr(module, "fused_projections", False):
            raise ConfigurationError(f"{name} has fused projections; call unfuse_qkv_projections() first")
    for name, module, members in wanted:
        missing = [member for member in members if not hasattr(module, member)]
        if missing:
            raise ConfigurationError(
                f"{name} ({type(module).__name__}) of diffusers {version} has no {', '.join(missing)}; this adapter "
                f"was made for diffusers {TESTED_VERSION}"
            )
    family.check(model)


def _is_diffusers(cls: type) -> bool:
    return cls.__module__.split(".", maxsplit=1)[0] == "diffusers"
