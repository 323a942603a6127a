"""Where lengths come from: published workloads, data codes, histograms, data sets of one's own, and steps made of them.

NumPy only. Imports ``given``.
"""
