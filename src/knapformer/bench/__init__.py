"""Workloads, measurements and training runs. Importing this package, or ``workloads``, does not import torch."""
