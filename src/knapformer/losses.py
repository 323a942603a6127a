"""The public door to ``knapformer.training.losses``."""

from knapformer.training.losses import flow_matching_pair, loss_counts, reduce_loss, squared_error

__all__ = ["flow_matching_pair", "loss_counts", "reduce_loss", "squared_error"]
