"""``python -m replaykit``: the command, begun as the script begins it."""

import sys

from replaykit_command import main

if __name__ == "__main__":
    sys.exit(main())
