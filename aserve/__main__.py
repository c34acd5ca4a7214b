"""``python -m aserve`` is the command line."""

import sys

from aserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
