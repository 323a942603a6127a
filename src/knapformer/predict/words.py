"""Ratios in words, so that a reader need not ask which way round they are."""

from __future__ import annotations


def than(ratio: float, other: str) -> str:
    """How fast something is beside another: ``1.39 × faster than home``, ``1.39 × slower than home``.

    Args:
        ratio: speed over the other's, above 0.
        other: what it is compared with.
    """
    if f"{ratio:.2f}" == "1.00":
        return f"as fast as {other}"
    return f"{ratio:.2f} × faster than {other}" if ratio > 1 else f"{1 / ratio:.2f} × slower than {other}"
