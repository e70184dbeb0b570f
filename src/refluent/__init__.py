"""The gradient of attention, for PyTorch users."""

from refluent.errors import UnsupportedError

__all__ = ["UnsupportedError"]
__version__ = "0.1.0"
