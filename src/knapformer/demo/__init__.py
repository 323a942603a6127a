"""The training comparison behind ``knapformer demo`` and ``bench``: samples, the model, the ranks, the results.

Imports everything above it; ``report`` and ``cli`` use it.
"""
