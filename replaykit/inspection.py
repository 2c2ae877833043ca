"""Inspection and validation of the data at a path.

This package reads data sets, checkpoints, directories of memory-mapped buffers, and H5 files. It
returns their keys, episodes and statistics, and can make an HTML page that shows them. The package
prints nothing.
"""

from replaykit.tools.facts import EpisodeFacts, Facts, Finding, KeyFacts, LayoutGuess, Spread
from replaykit.tools.layouts import guess_layout, known_layouts, layout_named
from replaykit.tools.source_facts import repair
from replaykit.tools.validation import kind_of, opened, validate

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
    "repair",
    "validate",
]
