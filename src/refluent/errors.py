"""The one exception of our own."""

from __future__ import annotations


class UnsupportedError(NotImplementedError):
    """A valid request that this backend, or this way of calling, cannot serve.

    The message names the backend (or the transform) and says what would work. Wrong input is a ValueError
    (value, shape, type, device, stride) or a TypeError (wrong kind) instead.
    """
