"""What won is in the rows of ``simulate``, and below its tables."""

from knapformer import CostModel
from knapformer.given.lengths import Lengths
from knapformer.plans.registry import PlannerSpec
from knapformer.predict.simulate import Setting, simulate
from knapformer.predict.simulate_tables import reason_lines


def test_winners_are_counted():
    steps = [Lengths.from_ranks([[], [4000, 20000], [], [500]])] * 2 + [Lengths.from_ranks([[256, 256]] * 2 + [[]] * 2)]
    specs = [PlannerSpec("home"), PlannerSpec("moldable")]
    rows = simulate(steps, specs, Setting(CostModel()), max_tokens_per_rank="auto")
    assert rows["moldable"]["reasons"] == {"ulysses": 2, "whole sequences": 1}
    assert rows["home"]["reasons"] == {}
    assert reason_lines(rows) == ["what won, moldable: ulysses 2 ×, whole sequences 1 ×"]
