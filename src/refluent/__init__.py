"""Attention with any mask and any score function, and its gradient, for PyTorch users."""

from refluent.attention import AttentionGradients, attention, attention_backward, attention_varlen
from refluent.errors import UnsupportedError
from refluent.validate import validate

__all__ = [
    "AttentionGradients",
    "UnsupportedError",
    "attention",
    "attention_backward",
    "attention_varlen",
    "validate",
]
__version__ = "0.1.0"
