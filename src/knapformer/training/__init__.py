"""What a training loop needs around balanced steps: losses, a batch sampler, FSDP2 and checkpointing from outside.

Imports ``given``, ``workloads`` and ``execution``; knows nothing of plans.
"""
