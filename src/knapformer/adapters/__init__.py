"""Adapters: transformers of diffusers, and the interface of the published KnapFormer package."""

from knapformer.adapters.diffusers import FAMILIES, balance, cost_of, prepare, unbalance

__all__ = ["FAMILIES", "balance", "cost_of", "prepare", "unbalance"]
