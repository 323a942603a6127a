"""What this machine does: calibration, replay of plans on one device, clocks, links, memory.

Imports everything above ``measure``; ``predict`` and ``demo`` may use it, never the other way round.
"""
