"""score_mod and mask_mod: traced once, differentiated, run on tiles."""

from refluent.mods.api import clear_cache, mask_mod, score_mod
from refluent.mods.mod import Captured, Mod, Origin, Read, TracedMod

__all__ = ["Captured", "Mod", "Origin", "Read", "TracedMod", "clear_cache", "mask_mod", "score_mod"]
