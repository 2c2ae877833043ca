"""What a path holds, as plain facts, and whether it is whole.

Published data sets, checkpoints, directories of memory-mapped buffers, H5 files: for each what its
keys, episodes and statistics are, and a page that shows them. Nothing here prints.
"""

from replaykit.inspection.facts import EpisodeFacts, Facts, Finding, KeyFacts, LayoutGuess, Spread
from replaykit.inspection.layouts import guess_layout, known_layouts, layout_named
from replaykit.inspection.validation import kind_of, opened, validate

__all__ = [
    "EpisodeFacts",
    "Facts",
    "Finding",
    "KeyFacts",
    "LayoutGuess",
    "Spread",
    "guess_layout",
    "kind_of",
    "known_layouts",
    "layout_named",
    "opened",
    "validate",
]
