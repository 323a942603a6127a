"""What a training loop needs around balanced steps: losses, FSDP2 and checkpointing from outside.

Imports ``models`` and ``execution.devices``; knows nothing of plans.
"""
