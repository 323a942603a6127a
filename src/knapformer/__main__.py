"""``python -m knapformer`` is the ``knapformer`` command, for torchrun's ``-m``."""

import sys

from knapformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
