"""Activation checkpointing from outside: same gradients and state dict, and it does recompute."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from model_cases import dit, error, gradients, largest_error, mmdit, run, samples

from knapformer.errors import ConfigurationError
from knapformer.models import local_attention
from knapformer.parallel import checkpoint, checkpointed, shard

MODELS = {"dit": dit, "mmdit": mmdit, "mmdit, double blocks only": lambda: mmdit(3, 2, 0)}


@pytest.fixture(params=MODELS)
def build(request):
    return MODELS[request.param]


def run_and_count(model, batch):
    """Gradients, and how often projections and attention ran in forward and backward together."""
    counts = {"projections": 0, "attentions": 0}

    def count_projection(*_):
        counts["projections"] += 1

    hooks = [m.register_forward_hook(count_projection) for m in model.modules() if type(m).__name__ == "HeadNorm"]
    inner = local_attention([len(s.position_ids if hasattr(model, "double_blocks") else s.visual) for s in batch])

    def attention(q, k, v, **options):
        counts["attentions"] += 1
        return inner(q, k, v, **options)

    found = gradients(model, batch, run(model, batch, attention=attention))
    for hook in hooks:
        hook.remove()
    return found, counts["projections"] // len(hooks), counts["attentions"] // len(model.blocks)


@pytest.mark.parametrize(("what", "times"), [(None, (1, 1)), ("attention", (1, 2)), ("block", (2, 2))])
@pytest.mark.parametrize(("text", "visual"), [([3, 0, 2, 1], [9, 4, 0, 1]), ([], [])])
def test_same_gradients_with_recomputation(build, what, times, text, visual):
    batch = samples(text, visual)
    reference, *_ = run_and_count(build(), batch)
    model = build()
    if what:
        assert checkpoint(model, what=what) is model
    found, *counted = run_and_count(model, batch)
    # Without tokens there may be nothing to recompute for; the exchange of a balanced run sees to that itself.
    assert tuple(counted) == times or not text
    assert largest_error(found, reference) < 1e-12


@pytest.mark.parametrize("what", ["attention", "block"])
def test_saves_less_for_backward(what):
    """Bytes that autograd holds at the end of forward, parameters excluded."""
    batch = samples([40], [200])

    def saved_bytes(model):
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages = {}

        def note(x):
            if x.untyped_storage().data_ptr() not in parameters:
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            kept = run(model, batch)
        assert kept.requires_grad
        return sum(storages.values())

    assert saved_bytes(checkpoint(mmdit(), what=what)) < saved_bytes(mmdit()) * (0.5 if what == "block" else 1.0)


@pytest.mark.parametrize("what", ["attention", "block"])
def test_state_dict_and_copies(build, what):
    model = build()
    keys, names = list(model.state_dict()), [name for name, _ in model.named_modules()]
    checkpoint(model, what=what)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == names
    batch = samples([3], [5])
    before = run(model, batch)
    copied = copy.deepcopy(model)
    copied.reset_parameters(init_std=0.2)
    assert error(run(model, batch), before) == 0
    assert error(run(copied, batch), before) > 1e-3


def test_checkpointed_attention_passes_options_on():
    seen = {}

    def attention(q, k, v, *, scale=None, causal=False):
        seen.update(scale=scale, causal=causal)
        return q * k * v

    x = torch.ones(2, 1, 2, requires_grad=True)
    checkpointed(attention)(x, x, x, scale=2.0, causal=True).sum().backward()
    assert seen == {"scale": 2.0, "causal": True}
    assert (x.grad == 3).all()


class WithoutAttention(torch.nn.Module):
    """A model that attends by itself, and is given no attention."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2)])

    def forward(self, x, attention=None):
        assert attention is None
        return self.blocks[0](x)


def test_a_model_that_is_given_no_attention_runs_as_before():
    model = WithoutAttention()
    expected = model(torch.ones(1, 2))
    assert torch.equal(checkpoint(model, what="attention")(torch.ones(1, 2)), expected)


def test_wrong_arguments(build):
    with pytest.raises(ConfigurationError, match="'block' or 'attention', got 'layer'"):
        checkpoint(build(), what="layer")
    for what in ("block", "attention"):
        with pytest.raises(ConfigurationError, match="MMDiT is checkpointed already"):
            checkpoint(checkpoint(mmdit(), what=what), what="block")
    for what in ("block", "attention"):
        partly = mmdit()
        checkpoint(SimpleNamespace(blocks=partly.blocks[1:2], _forward_pre_hooks={}), what="block")
        with pytest.raises(ConfigurationError, match="MMDiT is checkpointed already"):
            checkpoint(partly, what=what)
    with pytest.raises(ConfigurationError, match="Linear needs an attribute blocks"):
        checkpoint(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match=r"one type of device, got \['meta'\]"):
        shard(mmdit().to("meta"))
    with pytest.raises(ConfigurationError, match="give mesh or shard_size, not both, got a mesh and shard_size 2"):
        shard(mmdit(), mesh=object(), shard_size=2)
