"""``python -m replaykit``: the command."""

import sys

from replaykit.cli import main

if __name__ == "__main__":
    sys.exit(main())
