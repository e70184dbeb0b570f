"""Attention with any mask and any score function, and its gradient, for PyTorch users."""

from refluent.attention import AttentionGradients, attention, attention_backward, attention_varlen
from refluent.errors import UnsupportedError
from refluent.masks import create_block_mask
from refluent.mods import TracedMod, mask_mod, score_mod
from refluent.validate import validate

__all__ = [
    "AttentionGradients",
    "TracedMod",
    "UnsupportedError",
    "attention",
    "attention_backward",
    "attention_varlen",
    "create_block_mask",
    "mask_mod",
    "score_mod",
    "validate",
]
__version__ = "0.1.0"
