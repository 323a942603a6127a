"""Cost files: whose cost one holds, what it may stand for, and what is wrong with one, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.given.cost_files import CostFile
from knapformer.given.shapes import MODEL_SHAPES, model_shape, named_shape, stand_in_shape


def write(path: Path, cost: CostModel, **measured: Any) -> CostFile:
    path.write_text(json.dumps({"schema": "knapformer.cost/1", **cost.to_dict(), "measured": measured}))
    return CostFile.read(path)


def cost_of(name: str, **values: Any) -> CostModel:
    return CostModel.from_shape(named_shape(name), **values)


def test_a_file_stands_for_its_own_layer_at_any_depth(tmp_path: Path) -> None:
    deep = cost_of("demo", flops_per_s=7e9, gamma=1.3, num_layers=2)
    file = write(tmp_path / "cost.json", deep, model="demo")
    shape = stand_in_shape(num_heads=7, head_width=16, num_layers=11)
    scaled = file.for_shape(shape, "a deep one")
    assert (scaled.num_layers, scaled.flops_per_s, scaled.gamma) == (11, 7e9, 1.3)
    assert scaled.work_s([512]) == deep.work_s([512])
    assert file.for_model("demo") == deep


def test_a_file_stands_for_no_other_model(tmp_path: Path) -> None:
    """Each known model's file is refused for every model with another layer, and taken for those with the same."""
    for name in ("flux.1-dev", "wan2.1-14b", "hunyuanvideo"):
        own = model_shape(name)
        file = write(tmp_path / f"{name}.json", cost_of(name), model=name)
        for other, shape in MODEL_SHAPES.items():
            alike = all(
                getattr(own, part) == getattr(shape, part)
                for part in ("attention_width", "num_heads", "linear_flops_per_token", "attention_flops_per_pair")
            )
            if alike:
                assert file.for_model(other).num_layers == shape.num_layers
            else:
                with pytest.raises(ConfigurationError, match=f"of a layer of {name} with .* {other} has "):
                    file.for_model(other)


def test_heads_and_flops_count_too(tmp_path: Path) -> None:
    file = write(tmp_path / "cost.json", CostModel(hidden=3072, num_heads=12))
    for shape, message in (
        (stand_in_shape(num_heads=24, head_width=128, num_layers=1), "heads 12; x has heads 24"),
        (model_shape("wan2.1-14b"), "width 3072, heads 12; x has width 5120, heads 40"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            file.for_shape(shape, "x")


def test_a_file_that_names_a_model_whose_layer_it_does_not_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"layer of flux.1-dev with width 64, heads 4; flux.1-dev has width 3072"
    ):
        write(tmp_path / "cost.json", CostModel(hidden=64, num_heads=4), model="flux.1-dev")


def test_times_are_compared_only_with_those_of_the_same_stand_in_and_device(tmp_path: Path) -> None:
    described = {"model": "demo", "dtype": "float32", "recompute": False, "num_blocks": [1, 1]}
    file = write(tmp_path / "cost.json", cost_of("demo"), **described, environment={"device": "Xeon"})
    file.check_measured(described, "Xeon")
    for changed, message in (
        ({"dtype": "bfloat16"}, "was measured with dtype float32, this is dtype bfloat16"),
        ({"recompute": True}, "with recompute False, this is recompute True"),
        ({"num_blocks": [2, 2]}, r"with num_blocks \[1, 1\], this is num_blocks \[2, 2\]"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            file.check_measured(described | changed, "Xeon")
    with pytest.raises(ConfigurationError, match="with device Xeon, this is device H100"):
        file.check_measured(described, "H100")
    silent = write(tmp_path / "silent.json", cost_of("demo"))
    with pytest.raises(ConfigurationError, match="does not say with which model it was measured"):
        silent.check_measured(described, "Xeon")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measured": []}, "measured: all of it: Input should be .*got a list"),
        ({"measured": {"environment": {"device": 3}}}, "measured: environment.device: Input should be .*got 3"),
        ({"measured": {"fit": {"t0_s": -1.0}}}, "measured: fit.t0_s: .*greater than or equal to 0, got -1.0"),
        ({"measured": {"reference_s": 1e300}}, "measured: reference_s: .*less than or equal to 1000000, got 1e"),
        ({"num_layers": 2.5}, "num_layers must be an integer above 0, got 2.5"),
        ({"num_layers": 10**9}, "num_layers must be 10000 at most"),
        ({"num_heads": None}, "num_heads must be an integer above 0, got None"),
        ({"machine": {"speeds": "fast"}}, "speeds must list one number for each rank"),
        ({"gamma": float("nan")}, "gamma must be a number"),
    ],
)
def test_a_wrong_value_is_named_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(cost_of("demo").to_dict() | change))
    with pytest.raises(ConfigurationError, match=message) as error:
        CostFile.read(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
