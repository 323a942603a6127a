"""Adapters: transformers of diffusers, and the interface of the published KnapFormer package.

Imports ``models``, ``training``, ``balancer`` and what these import.
"""

from knapformer.adapters.diffusers import FAMILIES, balance, cost_of, prepare, unbalance, unbalanced

__all__ = ["FAMILIES", "balance", "cost_of", "prepare", "unbalance", "unbalanced"]
