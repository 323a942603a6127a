"""Variable-length attention on the CPU against plain softmax, entry by entry."""

from __future__ import annotations

import importlib
import math
import sys
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from knapformer.errors import ConfigurationError
from knapformer.execution import kernels
from knapformer.execution.kernels import KERNELS, Offsets, choose_kernel, varlen_attention

CASES = {
    "mixed": ([3, 5, 5, 1], [3, 5, 5, 1]),
    "empty entries": ([0, 4, 0, 0, 2, 0], [0, 4, 0, 0, 2, 0]),
    "query tiles": ([2, 3, 7, 1], [9, 9, 7, 4]),
    "queries without keys": ([2, 3, 2], [4, 0, 4]),
    "no key at all": ([2, 3], [0, 0]),
    "keys without queries": ([2, 0, 2], [4, 6, 4]),
    "one entry": ([6], [6]),
    "no entry": ([], []),
    "nothing": ([0, 0], [0, 0]),
}


def naive(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[list[int], list[int]], scale: float, causal: bool) -> Tensor:
    """Each query head and entry on its own."""
    out = q * 0
    group = q.shape[1] // k.shape[1]
    bounds = [list(pairwise([0, *accumulate(own)])) for own in lengths]
    for (a, b), (c, d) in zip(*bounds, strict=True):
        for head in range(q.shape[1]):
            scores = q[a:b, head] @ k[c:d, head // group].T * scale
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1 + d - c - (b - a)).bool(), -math.inf)
            if d > c:
                out[a:b, head] = scores.softmax(dim=-1) @ v[c:d, head // group]
    return out


def all_later(queries: list[int], keys: list[int]) -> bool:
    """Whether all entries have as many keys as queries, or more."""
    return all(q <= k for q, k in zip(queries, keys, strict=True))


def inputs(lengths: tuple[list[int], list[int]], num_heads: int, num_kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [(sum(lengths[0]), num_heads), (sum(lengths[1]), num_kv_heads), (sum(lengths[1]), num_kv_heads)]
    return [torch.randn(*r, 8, generator=generator, dtype=torch.float64, requires_grad=True) for r in rows]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(
    ("name", "causal"), [(name, c) for name, own in CASES.items() for c in (False, True) if not c or all_later(*own)]
)
def test_equals_plain_attention(name, scale, causal, num_heads, num_kv_heads):
    lengths = CASES[name]
    q, k, v = inputs(lengths, num_heads, num_kv_heads)
    cu_q, cu_k = ([0, *accumulate(own)] for own in lengths)
    found = varlen_attention(q, k, v, cu_q, Offsets(cu_k, q.device), scale=scale, causal=causal)
    expected = naive(q, k, v, lengths, 8**-0.5 if scale is None else scale, causal)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert found.requires_grad
    gradients = torch.autograd.grad((found * weight).sum(), (q, k, v))
    reference = torch.autograd.grad((expected * weight).sum(), (q, k, v), materialize_grads=True, allow_unused=True)
    for g, r in zip(gradients, reference, strict=True):
        assert torch.allclose(g, r, rtol=1e-10, atol=1e-12)


def test_entries_see_nothing_else():
    """The negative control of the comparison: other bounds give other values."""
    q, k, v = inputs(([4, 4], [4, 4]), 2, 2)
    found = varlen_attention(q, k, v, [0, 4, 8], [0, 4, 8])
    assert not torch.allclose(found, naive(q, k, v, ([3, 5], [3, 5]), 8**-0.5, False))
    assert not torch.allclose(found, naive(q, k, v, ([4, 4], [4, 4]), 8**-0.5, True))


def test_unknown_kernel():
    q, k, v = inputs(([1], [1]), 1, 1)
    with pytest.raises(ConfigurationError, match="unknown attention kernel 'fast'; known: auto, sdpa, flash, varlen"):
        varlen_attention(q, k, v, [0, 1], [0, 1], kernel="fast")


def test_queries_without_any_key_get_nothing():
    q, k, v = inputs(([2, 3], [0, 0]), 2, 1)
    y = varlen_attention(q, k, v, [0, 2, 5], [0, 0, 0])
    assert y.shape == q.shape and not y.any()
    assert [g.shape for g in torch.autograd.grad(y.sum(), (q, k, v))] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize(
    ("width", "capability", "dtype", "has_flash", "expected"),
    [
        (64, (9, 0), torch.bfloat16, True, "flash"),
        (64, (9, 0), torch.bfloat16, False, "varlen"),
        (256, (8, 0), torch.float16, True, "flash"),
        (20, (9, 0), torch.bfloat16, True, "sdpa"),
        (264, (9, 0), torch.bfloat16, True, "sdpa"),
        (64, (7, 5), torch.float16, True, "sdpa"),
        (64, (9, 0), torch.float32, True, "sdpa"),
    ],
)
def test_which_kernel_a_gpu_uses(monkeypatch, width, capability, dtype, has_flash, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(kernels, "_flash_attention", lambda: print if has_flash else None)
    monkeypatch.setattr(kernels, "_has_torch_varlen", lambda: True)
    assert choose_kernel(SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(5, 4, width))) == expected


def test_a_package_of_another_generation_is_not_used(monkeypatch, tmp_path):
    """FlashAttention 4 brings a folder of the same name, without the function of 2."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert kernels._flash_attention.__wrapped__() is None
    (tmp_path / "flash_attn" / "__init__.py").write_text("def flash_attn_varlen_func(): ...\n")
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    importlib.invalidate_caches()
    assert callable(kernels._flash_attention.__wrapped__())
    monkeypatch.delitem(sys.modules, "flash_attn")


def test_the_cpu_uses_sdpa():
    assert choose_kernel(torch.zeros(1, 1, 8, dtype=torch.bfloat16)) == "sdpa"
    assert set(KERNELS) == {"sdpa", "flash", "varlen"}


def fake_gpu_kernel(name: str, seen: list[str]):
    """A stand-in for a GPU's kernel that computes what its arguments ask for, entry by entry."""

    def attend(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, causal):
        seen.append(name)
        assert cu_q.dtype == cu_k.dtype == torch.int32
        lengths = tuple(cu.diff().tolist() for cu in (cu_q, cu_k))
        assert (max_q, max_k) == tuple(max(own) for own in lengths)
        return naive(q, k, v, lengths, q.shape[-1] ** -0.5 if scale is None else scale, causal)

    def flash(q, k, v, cu_q, cu_k, max_q, max_k, *, softmax_scale=None, causal=False):
        return attend(q, k, v, cu_q, cu_k, max_q, max_k, scale=softmax_scale, causal=causal)

    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        assert window_size in ((-1, -1), (-1, 0))
        assert enable_gqa or k.shape[1] == q.shape[1], "grouped heads must be asked for"
        return attend(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, causal=window_size == (-1, 0))

    return flash if name == "flash" else varlen


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("kernel", ["flash", "varlen"])
def test_kernels_of_gpus_are_asked_for_the_same_attention(monkeypatch, kernel, scale, causal, num_kv_heads):
    seen: list[str] = []
    fake = fake_gpu_kernel(kernel, seen)
    if kernel == "flash":
        monkeypatch.setattr(kernels, "_flash_attention", lambda: fake)
    else:
        monkeypatch.setattr(pytest.importorskip("torch.nn.attention.varlen"), "varlen_attn", fake)
    lengths = ([2, 7, 1], [9, 7, 4])
    q, k, v = inputs(lengths, 4, num_kv_heads)
    cu_q, cu_k = ([0, *accumulate(own)] for own in lengths)
    options = {"scale": scale, "causal": causal}
    found = varlen_attention(q, k, v, cu_q, cu_k, kernel=kernel, **options)
    assert seen == [kernel]
    assert torch.allclose(found, varlen_attention(q, k, v, cu_q, cu_k, **options), rtol=1e-12, atol=1e-12)


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(kernels, "_flash_attention", lambda: None)
    q, k, v = inputs(([1], [1]), 1, 1)
    with pytest.raises(ConfigurationError, match="'flash' needs the package flash-attn"):
        varlen_attention(q, k, v, [0, 1], [0, 1], kernel="flash")


@pytest.mark.parametrize("missing", [None, "scale", "window_size", "enable_gqa"])
def test_a_torch_whose_varlen_lacks_an_option_uses_sdpa(monkeypatch, missing):
    module = pytest.importorskip("torch.nn.attention.varlen")
    options = [name for name in ("scale", "window_size", "enable_gqa") if name != missing]
    namespace: dict[str, object] = {}
    exec(f"def varlen_attn(query, key, value, *, {', '.join(f'{name}=None' for name in options)}): ...", namespace)
    monkeypatch.setattr(module, "varlen_attn", namespace["varlen_attn"])
    assert kernels._has_torch_varlen.__wrapped__() == (missing is None)
