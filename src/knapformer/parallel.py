"""The public door to ``knapformer.training.parallel``."""

from knapformer.training.parallel import checkpoint, checkpointed, shard

__all__ = ["checkpoint", "checkpointed", "shard"]
