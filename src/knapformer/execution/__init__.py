"""Schedules on tensors: process groups, exchanges, kernels. The only collectives are in ``groups`` and ``transport``.

Imports ``given``, ``plans`` and ``schedules``; needs torch, as everything below.
"""
