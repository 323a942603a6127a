"""Advice on data sets: reading tables, drawing batches, what is said, and what is refused."""

import json
import random
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from knapformer.cli import main
from knapformer.errors import CapacityError
from knapformer.given.shapes import model_shape
from knapformer.predict.advise import advise
from knapformer.predict.advise_page import advice_lines
from knapformer.predict.hardware import hardware
from knapformer.predict.memory import MemoryModel
from knapformer.predict.simulate import setting_of
from knapformer.predict.subject import find_subject
from knapformer.workloads.dataset import grouped_steps, random_steps, read_dataset

HUNYUAN = model_shape("hunyuanvideo")
BUCKETS = [(256, 256, 1), (512, 512, 1), (1024, 1024, 1), (848, 480, 49), (1280, 720, 129)]


def table(num_rows: int) -> pd.DataFrame:
    rng = random.Random(1)
    rows = rng.choices(BUCKETS, (20, 30, 30, 15, 5), k=num_rows)
    return pd.DataFrame(rows, columns=["width", "height", "frames"]).assign(
        text_tokens=[rng.randint(0, 256) for _ in rows]
    )


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".tsv"])
def test_a_table_of_sizes_becomes_the_models_tokens(tmp_path: Path, suffix: str) -> None:
    frame, file = table(50), tmp_path / f"sizes{suffix}"
    if suffix == ".parquet":
        frame.to_parquet(file)
    else:
        frame.to_csv(file, index=False, sep="\t" if suffix == ".tsv" else ",")
    expected = [HUNYUAN.tokens(r.height, r.width, r.frames, r.text_tokens) for r in frame.itertuples()]
    assert read_dataset(file, HUNYUAN).tolist() == expected


def test_cross_attention_leaves_text_out_and_padding_counts(tmp_path: Path) -> None:
    file = tmp_path / "one.csv"
    file.write_text("Width,HEIGHT,text_tokens\n64,64,20\n")
    assert read_dataset(file, model_shape("wan2.1-1.3b")).tolist() == [16]
    assert read_dataset(file, model_shape("z-image")).tolist() == [32 + 32]


def test_lengths_come_from_a_column_or_a_lengths_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("name,length\nx,10\ny,20\n")
    (tmp_path / "a.json").write_text('{"lengths": [[10], [20]]}')
    for name in ("a.csv", "a.json"):
        assert read_dataset(tmp_path / name, HUNYUAN).tolist() == [10, 20]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "w,h\n1,2\n",
            "needs a column length, or columns width and height (and frames, text_tokens), got ['w', 'h']",
        ),
        ("a.csv", "width,height\n64,64\n64,-8\n", "row 2: height must be an integer of at least 1, got"),
        ("a.csv", "width,height\n64,64\n64,12.5\n", "row 2: height must be an integer of at least 1, got"),
        ("a.csv", "length\nlong\n", "row 1: length must be an integer of at least 1, got 'long'"),
        ("a.csv", "length\n", "has no rows"),
        ("a.csv", "", "is empty"),
        ("a.parquet", "not parquet", "cannot read"),
        ("a.txt", "1\n2\n", "expected a .json, .csv, .tsv or .parquet file, got '.txt'"),
        ("a.json", '{"lengths": [[], []]}', "has no sequences"),
        ("b.csv", None, "cannot read"),
    ],
)
def test_bad_files_are_one_line(
    tmp_path: Path, name: str, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main(["advise", str(tmp_path / name), "--ranks", "8"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "bert"], "unknown model 'bert'; known:"),
        (["--hardware", "abacus"], "unknown hardware 'abacus'"),
        (["--shard-size", "3"], "--shard-size must divide 8 ranks, got 3"),
        (["--memory-gb", "20"], "GB too many; shard over more than 8 ranks"),
    ],
)
def test_bad_options_are_one_line(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("length\n100\n")
    assert main(["advise", str(tmp_path / "a.csv"), "--ranks", "8", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_steps_hold_their_budget_and_grouping_makes_batches_alike() -> None:
    tokens = np.random.default_rng(0).integers(10, 1000, 5000)
    for make in (random_steps, grouped_steps):
        steps = make(tokens, num_ranks=4, tokens_per_rank=3000, num_steps=6, rng=np.random.default_rng(0))
        assert len(steps) == 6 and all(step.num_ranks == 4 for step in steps)
        assert all(step.of_rank(r).sum() <= 3000 for step in steps for r in range(4))
        spread = np.mean([np.ptp(step.of_rank(r)) for step in steps for r in range(4)])
        assert (spread < 100) == (make is grouped_steps)


def test_a_sample_beyond_the_budget_still_comes_alone() -> None:
    steps = random_steps(np.asarray([50]), num_ranks=2, tokens_per_rank=10, num_steps=1, rng=np.random.default_rng(0))
    assert steps[0].to_lists() == [[50], [50]]


def advice_for(tokens: list[int], **options: object) -> object:
    device = hardware("h100")
    memory = MemoryModel.of_model("hunyuanvideo", HUNYUAN, shard_size=8)
    setting = setting_of(device.cost(HUNYUAN), device, memory, num_ranks=8)
    arguments = {"num_ranks": 8, "memory_bytes": 80e9, "num_steps": 4, **options}
    return advise(np.asarray(tokens), setting, memory, **arguments)  # type: ignore[arg-type]


def test_level_data_need_no_balancing_and_mixed_ones_do() -> None:
    level = advice_for([4096] * 100)
    mixed = advice_for([256] * 80 + [4096] * 40 + [50_000] * 4)
    assert level.planner == "home" and level.ways["moldable"]["gain"] == pytest.approx(1.0, abs=1e-6)
    assert mixed.planner == "moldable" and mixed.ways["moldable"]["gain"] > 1.3
    assert mixed.ways["moldable"]["gain"] >= mixed.ways["whole"]["gain"] - 1e-9
    assert mixed.longest_tokens == 50_000 and mixed.bags is not None


def test_what_breaks_the_memory_is_not_advised() -> None:
    """Long videos overfill every rank of every step: a way that ignores the cap is no way."""
    videos = advice_for([4096] * 20 + [400_000] * 20, memory_bytes=80e9)
    assert all(way.get("steps_over_memory", 1) for way in videos.ways.values())
    assert videos.planner is None and videos.bags is None and videos.most_loaded > videos.tokens_that_fit
    lines = "\n".join(advice_lines(videos, find_subject(model="hunyuanvideo"), shard_size=8))
    assert "Advice: load fewer tokens" in lines and "planner=" not in lines


def test_advice_is_what_a_balancer_takes() -> None:
    mixed = advice_for([256] * 80 + [4096] * 40 + [50_000] * 4)
    lines = "\n".join(advice_lines(mixed, find_subject(model="hunyuanvideo"), shard_size=8))
    assert "Advice: planner='moldable': " in lines and f"topology='{mixed.bags.removeprefix('bags:')}'" in lines
    level = advice_for([4096] * 100)
    assert level.bags is None, "no layout gains anything"


def test_a_sample_that_no_group_holds_is_refused_with_the_shortfall() -> None:
    with pytest.raises(CapacityError, match=r"has 9,000,000 tokens, 8 ranks hold [\d,]+ at most: [\d,]+ too"):
        advice_for([100, 9_000_000])


def test_a_hundred_thousand_rows_take_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "big.csv"
    table(100_000).to_csv(file, index=False)
    began = time.perf_counter()
    assert main(["advise", str(file), "--ranks", "32", "--model", "hunyuanvideo", "--hardware", "h200", "--json"]) == 0
    assert time.perf_counter() - began < 20
    content = json.loads(capsys.readouterr().out)
    assert content["num_samples"] == 100_000 and content["ways"]["moldable"]["gain"] > 1
