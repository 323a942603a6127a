"""A packed run equals each sequence's own run: outputs and all gradients."""

from __future__ import annotations

import pytest
import torch
from model_cases import alone, dit, error, gradients, largest_error, mmdit, pack, run, samples
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from knapformer.errors import LengthsError
from knapformer.models import local_attention

TEXT = [3, 0, 1, 4, 0, 2, 0]
VISUAL = [9, 12, 1, 0, 0, 17, 1]

MODELS = {
    "dit": dit,
    "dit, grouped heads": lambda num_heads: dit(2 * num_heads, num_kv_heads=2),
    "mmdit": mmdit,
    "mmdit, grouped heads": lambda num_heads: mmdit(2 * num_heads, num_kv_heads=num_heads),
    "mmdit, double blocks only": lambda num_heads: mmdit(num_heads, 2, 0),
    "mmdit, single blocks only": lambda num_heads: mmdit(num_heads, 0, 2),
}


def with_wrong_sequence(arguments):
    """The last token takes the first sequence's conditioning."""
    *others, sequence_index, streams = arguments
    return *others, torch.cat([sequence_index[:-1], sequence_index[:1]]), streams


def with_wrong_position(arguments):
    visual, text, position_ids, *others = arguments
    return visual, text, torch.cat([position_ids[:-1], position_ids[-1:] + 1]), *others


@pytest.fixture(params=MODELS)
def build(request):
    return MODELS[request.param]


@pytest.mark.parametrize("num_heads", [3, 5, 7])
def test_packed_equals_alone(build, num_heads):
    model, batch = build(num_heads), samples(TEXT, VISUAL)
    output = run(model, batch)
    reference, reference_gradients = alone(model, batch)
    assert output.abs().min() > 0
    assert error(output, reference) < 1e-10
    assert largest_error(gradients(model, batch, output), reference_gradients) < 1e-10


@pytest.mark.parametrize("change", [with_wrong_sequence, with_wrong_position])
def test_the_comparison_notices_one_wrong_token(build, change):
    model, batch = build(3), samples(TEXT[:-1], VISUAL[:-1])
    reference, reference_gradients = alone(model, batch)
    output = run(model, batch, change=change)
    assert error(output, reference) > 1e-4
    assert largest_error(gradients(model, batch, output), reference_gradients) > 1e-4


def test_the_comparison_notices_attention_across_sequences(build):
    model, batch = build(3), samples([3, 2], [9, 12])
    merged = local_attention([26 if hasattr(model, "double_blocks") else 21])
    assert error(run(model, batch, attention=merged), alone(model, batch)[0]) > 1e-4


def test_permuting_sequences_permutes_outputs(build):
    model, batch = build(3), samples(TEXT, VISUAL)
    order = [5, 2, 0, 6, 3, 1, 4]
    outputs = run(model, batch).split(VISUAL)
    permuted = run(model, [batch[i] for i in order])
    assert error(permuted, torch.cat([outputs[i] for i in order])) < 1e-12
    assert error(permuted, torch.cat(outputs)) > 1e-4


@pytest.mark.parametrize(("text", "visual"), [([], []), ([0], [0]), ([3, 1], [0, 0]), ([0, 0], [4, 1]), ([0], [1])])
def test_every_parameter_gets_a_gradient_whatever_is_missing(build, text, visual):
    model, batch = build(3), samples(text, visual)
    output = run(model, batch)
    assert output.shape == (sum(visual), 5)
    output.sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert missing == []
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    if not sum(visual):
        assert all((p.grad == 0).all() for p in model.parameters())


def test_a_parameter_without_a_gradient_is_noticed(build):
    model, batch = build(3), samples([], [])
    model.unused = torch.nn.Linear(2, 2)
    run(model, batch).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["unused.weight", "unused.bias"]


def test_attention_decides_scale_and_mask(build):
    """The model passes nothing but q, k, v; shapes are those of the contract."""
    model, batch = build(3), samples([3], [6])
    seen = []

    def attention(q, k, v, *, scale=None, causal=False):
        seen.append((q.shape, k.shape, v.shape, scale, causal))
        return q

    run(model, batch, attention=attention)
    config = model.config
    num_rows = 9 if hasattr(model, "double_blocks") else 6
    queries, keys = (num_rows, config.num_heads, 8), (num_rows, config.num_kv_heads, 8)
    assert seen == [(queries, keys, keys, None, False)] * len(model.blocks)


def test_local_attention_is_softmax_attention():
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, heads, 4, generator=random, dtype=torch.float64) for heads in (6, 2, 2))
    out = local_attention([4, 0, 3])(q, k, v, scale=0.7, causal=True)
    for start, end in ((0, 4), (4, 7)):
        for row in range(start, end):
            for head in range(6):
                scores = 0.7 * k[start : row + 1, head // 3] @ q[row, head]
                expected = torch.softmax(scores, 0) @ v[start : row + 1, head // 3]
                torch.testing.assert_close(out[row, head], expected, rtol=1e-12, atol=1e-14)


def test_local_attention_names_both_counts():
    x = torch.zeros(5, 1, 2)
    with pytest.raises(LengthsError, match="sum to 4 tokens, got 5 rows"):
        local_attention([1, 3])(x, x, x)


def test_training_init_starts_as_the_identity_and_learns(build):
    model, batch = build(3), samples(TEXT, VISUAL)
    model.reset_parameters()
    output = run(model, batch)
    assert (output == 0).all()
    target = torch.cat([s.weight for s in batch])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (run(model, batch) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_follows_float64(dtype):
    model, batch = mmdit(3), samples(TEXT, VISUAL)
    reference = run(model, batch)
    lower = model.to(dtype)
    output = run(
        lower, batch, change=lambda a: [x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for x in a]
    )
    assert output.dtype == dtype
    assert error(output.double(), reference) < (1e-5 if dtype == torch.float32 else 0.1)


def test_compiles_without_graph_breaks(build):
    """One graph, gradients included; a branch on data would raise here."""
    model, batch = build(3), samples([3, 1], [5, 2])
    reference = run(model, batch)

    def attention(q, k, v):
        parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)), strict=True)
        return torch.cat([scaled_dot_product_attention(*p, enable_gqa=grouped) for p in parts], dim=1).transpose(0, 1)

    lengths = [8, 3] if hasattr(model, "double_blocks") else [5, 2]
    grouped = model.config.num_kv_heads != model.config.num_heads
    compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    arguments = pack(batch)
    if hasattr(model, "double_blocks"):
        output = compiled(*arguments, attention=attention)
    else:
        visual, _, position_ids, conditioning, sequence_index, streams = arguments
        rows = [x.index_select(0, streams.visual) for x in (position_ids, sequence_index)]
        output = compiled(visual, rows[0], conditioning, rows[1], attention=attention)
    assert error(output, reference) < 1e-12
    assert largest_error(gradients(model, batch, output), gradients(model, batch, reference)) < 1e-12


def test_the_compiler_notices_a_branch_on_data():
    def branching(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(branching, backend="aot_eager", fullgraph=True)(torch.ones(3))


class Synchronisations(TorchDispatchMode):
    """Names the operations that make the host wait for a device: values read, and shapes that depend on data.

    ``tolist`` and ``numpy`` of CPU tensors are not dispatched, so it cannot see them.
    """

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        flat = torch.utils._pytree.tree_leaves(args)
        masked = name.startswith("index") and any(torch.is_tensor(x) and x.dtype == torch.bool for x in flat)
        if masked or name in {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}:
            self.found.add(name)
        return func(*args, **(kwargs or {}))


def test_no_device_synchronisation(build):
    model, batch = build(3), samples(TEXT, VISUAL)
    with Synchronisations() as mode:
        gradients(model, batch, run(model, batch))
    assert mode.found == set()


@pytest.mark.parametrize("wait", [lambda x: x[x > 0], lambda x: x.sum().item(), lambda x: x.any() or x])
def test_device_synchronisations_are_noticed(wait):
    with Synchronisations() as mode:
        wait(torch.ones(3))
    assert mode.found
