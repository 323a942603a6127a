"""Where lengths come from: published workloads, data codes, histograms, data sets of one's own. NumPy only.

Imports ``given``.
"""
