"""What people look at: rank grids and pages, made from plans and result files.

Imports ``demo.results`` and ``plans``; reads JSON only.
"""
