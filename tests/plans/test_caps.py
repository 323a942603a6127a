"""No planner ever exceeds a cap, and every step that caps cannot hold is refused with its shortfall."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knapformer.errors import CapacityError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths
from knapformer.given.shapes import model_shape
from knapformer.plans.planners import PLANNERS, make_plan
from knapformer.predict.hardware import hardware
from knapformer.predict.memory import MemoryModel

ROWS = st.lists(st.lists(st.integers(0, 400), max_size=5), min_size=1, max_size=6)


def fits_without_cuts(planner: str, rows: list[list[int]], caps: list[int], topology: str | None) -> bool:
    """Whether a planner that cannot cut sequences to fit keeps the caps.

    Planners without caps keep them where their plan does by itself. ``whole`` does where the caps hold the sequences as
    they are at home, or heaviest first, each on the rank with the least work that has room.
    """
    if planner != "whole":
        plan = make_plan(rows, planner=planner, topology=topology, max_tokens_per_rank=None)
        return bool((plan.rank_tokens <= caps).all())
    if all(sum(row) <= cap for row, cap in zip(rows, caps, strict=True)):
        return True
    tokens = Lengths.from_ranks(rows).tokens
    work, loads, room = CostModel().work_s(tokens).tolist(), [0.0] * len(rows), list(caps)
    for i in sorted(range(len(tokens)), key=lambda i: (-work[i], i)):
        ranks = [rank for rank, free in enumerate(room) if free >= tokens[i]]
        if not ranks:
            return False
        rank = min(ranks, key=lambda r: loads[r])
        loads[rank] += work[i]
        room[rank] -= int(tokens[i])
    return True


@pytest.mark.parametrize("planner", [name for name, p in PLANNERS.items() if p.package is None])
@given(rows=ROWS, data=st.data())
def test_caps_hold_or_the_step_is_refused(planner: str, rows: list[list[int]], data: st.DataObject) -> None:
    caps = data.draw(st.lists(st.integers(0, 900), min_size=len(rows), max_size=len(rows)))
    shortfall = sum(map(sum, rows)) - sum(caps)
    topology = f"g1n{len(rows)}" if planner == "bags" else None
    is_refused = shortfall > 0 or (planner != "moldable" and not fits_without_cuts(planner, rows, caps, topology))
    try:
        plan = make_plan(rows, planner=planner, topology=topology, max_tokens_per_rank=caps)
    except CapacityError as error:
        assert is_refused, "what fits is planned"
        if shortfall > 0:
            assert f"{shortfall} too many" in str(error)
        else:
            assert re.search(r"cap is \d+|under caps of \d+", str(error))
    else:
        assert (plan.rank_tokens <= caps).all()
        assert not is_refused


def test_a_cap_in_bytes_is_what_the_memory_model_lets_fit() -> None:
    memory = MemoryModel.of_model("flux.1-dev", model_shape("flux.1-dev"), shard_size=8)
    cap = memory.tokens_that_fit(hardware("h100").memory_bytes)
    plan = make_plan([[cap, cap // 2], [], [100], []], max_tokens_per_rank=cap)
    assert all(memory.peak_bytes(int(n)) <= 80e9 for n in plan.rank_tokens)
    with pytest.raises(CapacityError, match=f"{cap // 2} too many"):
        make_plan([[cap, cap // 2], [cap]], max_tokens_per_rank=cap)
