"""What is given: lengths, ranks, models, and what work costs on a machine. NumPy only; files are read with pydantic.

Imports ``errors`` and nothing else of the package.
"""
