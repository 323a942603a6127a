"""What would happen elsewhere: simulated steps, memory, hardware presets, advice, planners side by side. NumPy only.

Imports ``given``, ``plans``, ``schedules`` and ``workloads``.
"""
