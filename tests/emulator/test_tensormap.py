"""TMA descriptors: what the DSL writes for known tensors is read back, and what breaks the rules is said."""

from __future__ import annotations

import dataclasses
import struct
from math import prod

import pytest
import torch

from refluent.emulator.tensormap import TensorMap, TensorMapError, parse, violations

# 64-bit words written by nvidia-cutlass-dsl 4.8.1 for a (100, 72) bfloat16 tensor, box (16, 64), 128-byte swizzle
WORDS = [0x555817D1E2C0, 0x900046512, 0, 0, 0x6300000047, 0, 0x3F00000000000000, 0xF]


def packed(words):
    return struct.pack("<16Q", *words, *[0xDEAD] * (16 - len(words)))  # the second half is never written


def test_known_words():
    assert parse(packed(WORDS)) == TensorMap(
        address=0x555817D1E2C0,
        element="bf16",
        element_bytes=2,
        dims=(72, 100),
        strides=(2, 144),
        box=(64, 16),
        element_strides=(1, 1),
        swizzle=128,
        interleave=0,
        oob_fill="zero",
    )


def test_sizes():
    found = parse(packed(WORDS))
    assert found.rank == 2
    assert found.box_bytes == 64 * 16 * 2
    assert found.extent_bytes == 100 * 144


@pytest.mark.parametrize(
    ("word", "bit"),
    [(1, 0), (1, 11), (1, 12), (1, 15), (1, 17), (1, 18), (1, 22), (6, 32), (6, 55), (7, 32), (7, 63)],
)
def test_bits_never_seen_are_refused(word, bit):
    words = list(WORDS)
    words[word] ^= 1 << bit
    with pytest.raises(TensorMapError, match="not a TMA descriptor of the form"):
        parse(packed(words))


def test_wrong_size_rank_and_type_are_refused():
    with pytest.raises(TensorMapError, match="128 bytes, got 64"):
        parse(bytes(64))
    words = list(WORDS)
    words[1] |= 7 << 4
    with pytest.raises(TensorMapError, match="rank 8"):
        parse(packed(words))
    words = list(WORDS)
    words[1] |= 15 << 7
    with pytest.raises(TensorMapError, match="element type code 15"):
        parse(packed(words))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"address": 8}, "address 0x8 is not a multiple of 16"),
        ({"strides": (2, 72)}, "stride 1 is 72 bytes"),
        ({"box": (300, 16)}, "box dimension 0 has 300 elements"),
        ({"box": (12, 16)}, "inner dimension is 24 bytes"),
        ({"box": (72, 16)}, "144 bytes, more than its 128-byte swizzle"),
        ({"dims": (0, 100)}, "dimension 0 has 0 elements"),
    ],
)
def test_violations(change, text):
    good = parse(packed(WORDS))
    assert violations(good) == []
    assert any(text in line for line in violations(dataclasses.replace(good, **change)))


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int64])
@pytest.mark.parametrize(
    ("shape", "tile", "swizzle"),
    [
        ((300,), (64,), 0),
        ((100, 80), (16, 128), 128),
        ((100, 80), (5, 64), 64),
        ((5, 100, 80), (2, 16, 32), 32),
        ((3, 5, 7, 16), (2, 2, 3, 16), 0),
        ((3, 4, 5, 7, 16), (2, 2, 3, 3, 16), 0),
    ],
)
def test_descriptors_of_the_dsl(dtype, shape, tile, swizzle):
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    from cutlass.cute.runtime import from_dlpack

    from emulator.kernels.tma import TileCopy
    from emulator.recorder import recording

    size = dtype.itemsize
    tile = (*tile[:-1], tile[-1] // size)  # the inner extent is given in bytes
    space = torch.zeros([n + 16 // size for n in shape], dtype=dtype)  # a slice: dimensions do not merge
    x = space[tuple(slice(0, n) for n in shape)]
    tiles = torch.zeros(prod(-(-n // t) for n, t in zip(shape, tile)), prod(tile), dtype=dtype)
    with recording("sm_90a") as gpu:
        TileCopy(tile, swizzle).load(from_dlpack(x, assumed_align=16), from_dlpack(tiles))
        TileCopy(tile, swizzle).store(from_dlpack(tiles), from_dlpack(x, assumed_align=16))
    for launch in gpu.recorder.launches:
        (raw,) = [p for p in launch.params if len(p) == 128]
        found = parse(raw)
        assert violations(found) == []
        assert found.address == x.data_ptr()
        assert found.element_bytes == size
        assert found.dims == shape[::-1]
        assert found.strides == tuple(s * size for s in x.stride()[::-1])
        assert found.box == tile[::-1]
        assert found.swizzle == swizzle
        assert not found.to_tf32
