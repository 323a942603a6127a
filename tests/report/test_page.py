"""The page shows the figures of its results file, needs nothing from the network, and is not broken by odd names."""

from __future__ import annotations

import base64
import gzip
import json
import re

import pytest

pytest.importorskip("plotly")

from result_cases import result

from knapformer.errors import ConfigurationError
from knapformer.report.page import load_figure, loss_figure, render_page, steps_figure, time_figure


@pytest.fixture(scope="module")
def page():
    return render_page(json.loads(json.dumps(result())))


def test_the_page_holds_everything_itself(page):
    assert not re.search(r'(?:src|href)\s*=\s*"|@import|url\(', re.sub(r"<script.*?</script>", "", page, flags=re.S))
    packed = re.search(r'id="plotly">(.*?)</script>', page)[1]
    assert b"Plotly" in gzip.decompress(base64.b64decode(packed))[:10_000_000]
    assert len(page) < 2_500_000


def test_the_page_says_what_was_gained(page):
    assert "moldable trains 1.60 × as fast as home" in page
    assert "Perfect balance would give 1.50 ×" in page
    assert "largest relative difference at any step is 1.0e-06" in page
    assert "<tr class=best><td>moldable</td>" in page


def test_names_are_escaped(page):
    assert "A processor &lt;/script&gt;&lt;b&gt;" in page
    assert "A processor </script>" not in page


def test_figures_are_those_of_the_results():
    load = load_figure(result())
    bars = {trace["name"]: trace["y"] for trace in load["data"] if trace["type"] == "bar"}
    assert bars["home"] == [0.9, 0.3] and bars["moldable"] == [0.62, 0.58]
    assert load["layout"]["shapes"][0]["y0"] == pytest.approx(0.6)
    predicted = {trace["name"]: trace["y"] for trace in load["data"] if trace["type"] == "scatter"}
    assert {"cost model", "lower bound"} <= set(predicted)
    assert predicted["home predicted"] == pytest.approx([0.99, 0.3])
    boxes = {trace["name"]: trace["y"] for trace in steps_figure(result())["data"]}
    assert boxes["bags:g2n1"] == [0.8] * 3
    parts = {trace["name"]: trace["y"] for trace in time_figure(result())["data"]}
    assert parts["computing"] == pytest.approx([0.6, 0.6, 0.6])
    assert parts["waiting elsewhere"] == pytest.approx([0.4, 0.1, 0.0])
    assert loss_figure(result())["data"][0]["y"] == [2.0, 1.5, 1.25, 1.0]


def test_another_file_is_refused():
    with pytest.raises(ConfigurationError, match=r"schema 'knapformer\.bench/1', got None"):
        render_page({"schema": None})


def test_a_held_up_step_does_not_flatten_the_others():
    held_up = result()
    held_up["planners"]["home"]["step_s"][0][2] = 40.0
    assert steps_figure(held_up)["layout"]["yaxis"]["range"] == [0, 2.0]
    assert "1 held-up step off the scale" in render_page(held_up)
    assert "range" not in steps_figure(result())["layout"]["yaxis"]
    assert "off the scale" not in render_page(result())
