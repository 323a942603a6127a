"""What this machine does: calibration, replay of plans on one device, clocks, links, memory.

Imports ``balancer``, ``models`` and what these import.
"""
