"""The 128-byte TMA descriptor as the CuTe DSL's host code writes it: parsed and checked.

The hardware form of CUtensorMap is not documented. The fields below were read off descriptors that the DSL (the version
that driver.py accepts) wrote for known tensors: 64 bytes, the rest is left as it was. Bits that were never seen set are
refused, not skipped. The rules that `violations` states are those of cuTensorMapEncodeTiled in the CUDA driver API
manual.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DESCRIPTOR_BYTES = 128
MAX_RANK = 5

# hardware code -> (name as in PTX, bytes)
ELEMENT_TYPES = {
    0: ("u8", 1),
    1: ("u16", 2),
    2: ("u32", 4),
    3: ("s32", 4),
    4: ("u64", 8),
    5: ("s64", 8),
    6: ("f16", 2),
    7: ("f32", 4),
    8: ("f32.ftz", 4),
    9: ("f64", 8),
    10: ("bf16", 2),
}
SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128}
# The control word: fixed bits; rank, type and swizzle; conversion to tf32; whether the tensor has 128 KB or more.
_FIXED, _TF32, _LARGE = 1 << 18 | 2, 1 << 16, 1 << 21
_CONTROL_FIELDS = 7 << 4 | 15 << 7 | 3 << 13 | _TF32 | _LARGE
_ELEMENT_STRIDES = (1 << 56) - (1 << 32)  # in word 6, and above the boxes in word 7: 0 stands for 1


class TensorMapError(ValueError):
    """The 128 bytes are not a tiled TMA descriptor, or use a field that the emulator does not know."""


@dataclass(frozen=True)
class TensorMap:
    """One tiled TMA descriptor; every tuple runs from the innermost (contiguous) dimension outwards.

    address: bytes; dims and box: elements; strides: bytes, the innermost (= element_bytes) included; element_strides:
    elements; swizzle: 0, 32, 64 or 128 bytes; interleave: 0, 16 or 32 bytes; oob_fill: "zero" or "nan";
    to_tf32: float32 values are rounded to tf32 on the way into shared memory.
    """

    address: int
    element: str
    element_bytes: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    interleave: int
    oob_fill: str
    to_tf32: bool = False

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def box_bytes(self) -> int:
        """Bytes of one box in shared memory: what a load adds to its mbarrier, out-of-bounds elements included."""
        count = self.element_bytes
        for extent, step in zip(self.box, self.element_strides, strict=True):
            count *= -(-extent // step)
        return count

    @property
    def extent_bytes(self) -> int:
        """Bytes from `address` to the end of the last element of the tensor."""
        return self.element_bytes + sum((n - 1) * s for n, s in zip(self.dims, self.strides, strict=True))


def parse(descriptor: bytes | bytearray | memoryview | np.ndarray) -> TensorMap:
    """The descriptor in 128 bytes (any buffer of exactly that size); TensorMapError if a field is unknown."""
    raw = bytes(descriptor)
    if len(raw) != DESCRIPTOR_BYTES:
        raise TensorMapError(f"a TMA descriptor has {DESCRIPTOR_BYTES} bytes, got {len(raw)}")
    words = [int(w) for w in np.frombuffer(raw, dtype="<u8")]
    halves = [int(w) for w in np.frombuffer(raw, dtype="<u4")]
    control = halves[2]
    unknown = (control & ~_CONTROL_FIELDS) ^ _FIXED
    if unknown or words[6] & _ELEMENT_STRIDES or words[7] >> 32:
        raise TensorMapError(
            f"not a TMA descriptor of the form this emulator knows (control word {control:#x}, "
            f"words 6 and 7 {words[6]:#x} {words[7]:#x}): im2col, interleaved and strided elements are not supported"
        )
    rank = (control >> 4 & 7) + 1
    if rank > MAX_RANK:
        raise TensorMapError(f"TMA descriptor of rank {rank}; 1 to {MAX_RANK} exist")
    code = control >> 7 & 15
    if code not in ELEMENT_TYPES:
        raise TensorMapError(f"TMA descriptor with the unknown element type code {code}")
    element, element_bytes = ELEMENT_TYPES[code]
    strides = [element_bytes]
    for i in range(rank - 1):
        high = words[3] >> (32 + 4 * i) & 15
        strides.append((halves[3 + i] | high << 32) * 16)
    boxes = [words[6] >> 56 & 255] + [words[7] >> (8 * i) & 255 for i in range(4)]
    return TensorMap(
        address=words[0],
        element=element,
        element_bytes=element_bytes,
        dims=tuple(halves[8 + i] + 1 for i in range(rank)),
        strides=tuple(strides),
        box=tuple(b + 1 for b in boxes[:rank]),
        element_strides=(1,) * rank,
        swizzle=SWIZZLE_BYTES[control >> 13 & 3],
        interleave=0,
        oob_fill="zero",
        to_tf32=bool(control & _TF32),
    )


def violations(tensor_map: TensorMap) -> list[str]:
    """What cuTensorMapEncodeTiled would refuse, one sentence a rule; empty if the descriptor is well formed."""
    found = []
    if tensor_map.address % 16:
        found.append(f"the tensor's address {tensor_map.address:#x} is not a multiple of 16 bytes")
    for i, stride in enumerate(tensor_map.strides[1:], start=1):
        if stride % 16 or not 0 <= stride < 1 << 40:
            found.append(f"stride {i} is {stride} bytes; it must be a multiple of 16 below 2^40")
    for i, dim in enumerate(tensor_map.dims):
        if not 1 <= dim <= 1 << 32:
            found.append(f"dimension {i} has {dim} elements; 1 to 2^32 are allowed")
    for i, extent in enumerate(tensor_map.box):
        if not 1 <= extent <= 256:
            found.append(f"box dimension {i} has {extent} elements; 1 to 256 are allowed")
    inner = tensor_map.box[0] * tensor_map.element_bytes
    if inner % 16:
        found.append(f"the box's inner dimension is {inner} bytes; it must be a multiple of 16")
    if tensor_map.swizzle and inner > tensor_map.swizzle:
        found.append(f"the box's inner dimension is {inner} bytes, more than its {tensor_map.swizzle}-byte swizzle")
    return found
