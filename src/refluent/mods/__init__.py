"""score_mod and mask_mod: traced once, differentiated, run on tiles."""

from refluent.mods.mod import Captured, Mod, Origin, Read, TracedMod

__all__ = ["Captured", "Mod", "Origin", "Read", "TracedMod"]
