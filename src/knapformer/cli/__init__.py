"""The ``knapformer`` command. A command reads its options and calls one function of the folders above.

Imports everything; nothing imports it.
"""

from knapformer.cli.main import main

__all__ = ["main"]
