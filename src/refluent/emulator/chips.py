"""The chips that can be emulated, as host code sees them."""

from __future__ import annotations

from dataclasses import dataclass

from refluent.emulator.errors import DriverError

SHARED_PER_BLOCK, SHARED_PER_BLOCK_OPTIN, SHARED_PER_SM = 49152, 232448, 233472  # bytes


@dataclass(frozen=True)
class Chip:
    """An architecture and how many multiprocessors of it there are."""

    arch: str
    capability: tuple[int, int]
    num_sms: int

    @property
    def name(self) -> str:
        return f"emulated {self.arch}"

    def clusters(self, size: int) -> int:
        """Clusters of `size` CTAs, one CTA a multiprocessor, that run at once."""
        return max(1, self.num_sms // size)


_CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0)}
ARCHITECTURES = tuple(_CAPABILITY)


def architecture(name: str) -> str:
    """ "sm_100a" for "sm100", and the like; others as they are."""
    return next((arch for arch in ARCHITECTURES if name == arch.replace("_", "").removesuffix("a")), name)


def make_chip(arch: str, num_sms: int) -> Chip:
    if arch not in _CAPABILITY:
        raise DriverError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    if not 1 <= num_sms <= 1024:
        raise DriverError(f"num_sms must be between 1 and 1024, got {num_sms}")
    return Chip(arch, _CAPABILITY[arch], num_sms)
