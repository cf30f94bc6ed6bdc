"""`python -m lmoffload`."""

import sys

from lmoffload.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
