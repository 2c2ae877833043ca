"""Corpora: from H5 files, on a Hub or at hand, to transitions in memory-mapped columns.

A name is loaded when it is first asked for: the command says its help without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replaykit.datasets.base import BaseDatasetExperienceReplay
    from replaykit.datasets.converting import convert, open
    from replaykit.datasets.corpus import CorpusExperienceReplay
    from replaykit.datasets.engine.fields import (
        ARRIVALS,
        FINAL_STATE,
        STATE_RECORDS,
        STEPS,
        Alignment,
        Field,
    )
    from replaykit.datasets.engine.finding import Groups, Segments, WholeFile
    from replaykit.datasets.engine.layout import Layout
    from replaykit.datasets.engine.policies import Policies
    from replaykit.datasets.families.catalogue import (
        AlohaExperienceReplay,
        D4RLExperienceReplay,
        IsaacLabExperienceReplay,
        LiberoExperienceReplay,
        ManiSkillExperienceReplay,
        MinariExperienceReplay,
        RobomimicExperienceReplay,
        VD4RLExperienceReplay,
        load_dataset,
        plan,
    )
    from replaykit.datasets.families.roboset import RobosetExperienceReplay
    from replaykit.datasets.http_fetch import download
    from replaykit.datasets.hub_pull import pull
    from replaykit.datasets.hub_push import push

__all__ = [
    "ARRIVALS",
    "FINAL_STATE",
    "STATE_RECORDS",
    "STEPS",
    "Alignment",
    "AlohaExperienceReplay",
    "BaseDatasetExperienceReplay",
    "CorpusExperienceReplay",
    "D4RLExperienceReplay",
    "Field",
    "Groups",
    "IsaacLabExperienceReplay",
    "Layout",
    "LiberoExperienceReplay",
    "ManiSkillExperienceReplay",
    "MinariExperienceReplay",
    "Policies",
    "RobomimicExperienceReplay",
    "RobosetExperienceReplay",
    "Segments",
    "VD4RLExperienceReplay",
    "WholeFile",
    "convert",
    "download",
    "load_dataset",
    "open",
    "plan",
    "pull",
    "push",
]

_MODULES = {
    "ARRIVALS": "engine.fields",
    "FINAL_STATE": "engine.fields",
    "STATE_RECORDS": "engine.fields",
    "STEPS": "engine.fields",
    "Alignment": "engine.fields",
    "AlohaExperienceReplay": "families.catalogue",
    "BaseDatasetExperienceReplay": "base",
    "CorpusExperienceReplay": "corpus",
    "D4RLExperienceReplay": "families.catalogue",
    "Field": "engine.fields",
    "Groups": "engine.finding",
    "IsaacLabExperienceReplay": "families.catalogue",
    "Layout": "engine.layout",
    "LiberoExperienceReplay": "families.catalogue",
    "ManiSkillExperienceReplay": "families.catalogue",
    "MinariExperienceReplay": "families.catalogue",
    "Policies": "engine.policies",
    "RobomimicExperienceReplay": "families.catalogue",
    "RobosetExperienceReplay": "families.roboset",
    "Segments": "engine.finding",
    "VD4RLExperienceReplay": "families.catalogue",
    "WholeFile": "engine.finding",
    "convert": "converting",
    "download": "http_fetch",
    "load_dataset": "families.catalogue",
    "open": "converting",
    "plan": "families.catalogue",
    "pull": "hub_pull",
    "push": "hub_push",
}


def __getattr__(name: str) -> Any:
    """Loads the module of a public name, and keeps the name here."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
