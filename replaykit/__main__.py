"""Run the ``replaykit`` command as ``python -m replaykit``."""

import sys

from replaykit_command import main

if __name__ == "__main__":
    sys.exit(main())
