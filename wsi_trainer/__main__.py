"""`python -m wsi_trainer`: the command `wsi-train`."""

import sys

from wsi_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
