"""What is decided: which rank holds which tokens and computes which heads, and what that costs. NumPy only.

Imports ``given``. The algorithms are C++ (csrc/); each exists once.
"""
