"""What one rank does under a plan: the rows it sends and receives, the attention it computes. NumPy only.

Imports ``given`` and ``plans``.
"""
