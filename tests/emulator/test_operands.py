"""Matrix descriptors, TMA boxes and register fragments against element-by-element definitions."""

import numpy as np
import pytest

from refluent.emulator.isa import fragment_maps, numeric, tma_box, tmem
from refluent.emulator.isa.mma_tcgen05 import InstructionDescriptor, Mma
from refluent.emulator.isa.mma_wgmma import WgmmaShape
from refluent.emulator.isa.operand import DescriptorError, MatrixDescriptor, chunk_addresses, gather, swizzle_address
from refluent.emulator.tensormap import TensorMap

RNG = np.random.default_rng(11)
SM100_LAYOUT = {0: 0, 128: 2, 64: 4, 32: 6}
SM90_LAYOUT = {0: 0, 128: 1, 64: 2, 32: 3}


def descriptor_word(arch, start, leading, stride, swizzle):
    word = (start >> 4) | ((leading >> 4) << 16) | ((stride >> 4) << 32)
    return word | (1 << 46) | (SM100_LAYOUT[swizzle] << 61) if arch == 100 else word | (SM90_LAYOUT[swizzle] << 62)


def bf16_matrix(*shape):
    return (RNG.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def store_box(window, start, matrix, swizzle):
    """A row-major (rows, columns) 16-bit matrix as TMA lays a box of it, one byte at a time."""
    width = matrix.shape[1] * 2
    raw = matrix.view(np.uint8)
    for r in range(matrix.shape[0]):
        for b in range(width):
            address = start + r * width + b
            if swizzle:
                address ^= ((address >> 7) & (swizzle // 16 - 1)) << 4
            window[address] = raw[r, b]


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_k_major_operand_reads_what_a_swizzled_box_holds(arch, swizzle):
    columns = swizzle // 2
    matrix, window = bf16_matrix(64, columns), RNG.integers(0, 255, 1 << 16, dtype=np.uint8)
    store_box(window, 2048, matrix, swizzle)
    for k in range(0, columns, 16):
        word = descriptor_word(arch, 2048 + 2 * k, 16, 8 * swizzle, swizzle)
        descriptor = MatrixDescriptor.decode(word, arch)
        got = gather(window, chunk_addresses(descriptor, 64, 32, 2, False), 2, False)
        assert np.array_equal(got, matrix[:, k : k + 16])


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_mn_major_operand_reads_the_transpose(arch, swizzle):
    span = swizzle // 2
    matrix, window = bf16_matrix(32, 2 * span), RNG.integers(0, 255, 1 << 16, dtype=np.uint8)
    half = 32 * swizzle
    store_box(window, 4096, np.ascontiguousarray(matrix[:, :span]), swizzle)
    store_box(window, 4096 + half, np.ascontiguousarray(matrix[:, span:]), swizzle)
    for k in range(0, 32, 16):
        word = descriptor_word(arch, 4096 + k * swizzle, half, 8 * swizzle, swizzle)
        descriptor = MatrixDescriptor.decode(word, arch)
        got = gather(window, chunk_addresses(descriptor, 2 * span, 32, 2, True), 2, True)
        assert np.array_equal(got, matrix[k : k + 16].T)


def test_unswizzled_operands_follow_core_matrices():
    window = RNG.integers(0, 255, 1 << 16, dtype=np.uint8)
    halves = window.view(np.uint16)
    descriptor = MatrixDescriptor.decode(descriptor_word(100, 1024, 512, 256, 0), 100)
    k_major = gather(window, chunk_addresses(descriptor, 16, 32, 2, False), 2, False)
    mn_major = gather(window, chunk_addresses(descriptor, 16, 32, 2, True), 2, True)
    for row in range(16):
        for k in range(16):
            assert k_major[row, k] == halves[(1024 + row // 8 * 256 + row % 8 * 16 + k // 8 * 512) // 2 + k % 8]
            assert mn_major[row, k] == halves[(1024 + row // 8 * 256 + k % 8 * 16 + k // 8 * 512) // 2 + row % 8]


def test_unknown_descriptors_are_refused():
    with pytest.raises(DescriptorError, match="layout type 1"):
        MatrixDescriptor.decode((1 << 46) | (1 << 61), 100)
    with pytest.raises(DescriptorError, match="version"):
        MatrixDescriptor.decode(2 << 61, 100)
    with pytest.raises(DescriptorError, match="base offset"):
        MatrixDescriptor.decode(descriptor_word(90, 0, 16, 1024, 128) | (3 << 49), 90)
    with pytest.raises(DescriptorError, match="sparsity"):
        InstructionDescriptor.decode(4, "kind::f16")


def instruction_word(m, n, a=1, b=1, d=1, a_mn=0, b_mn=0):
    return (d << 4) | (a << 7) | (b << 10) | (a_mn << 15) | (b_mn << 16) | ((n // 8) << 17) | ((m // 16) << 24)


class Cta:
    def __init__(self):
        self.shared = RNG.integers(0, 255, 1 << 17, dtype=np.uint8)
        self.tmem = RNG.standard_normal((128, 512)).astype(np.float32).view(np.uint32)


def place(cta, start, rows):
    """A K-major (rows, 16) operand at `start`, 32-byte swizzle."""
    store_box(cta.shared, start, rows, 32)
    return MatrixDescriptor.decode(descriptor_word(100, start, 16, 256, 32), 100)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("m", "group"), [(64, 1), (128, 1), (128, 2), (256, 2)])
def test_tcgen05_mma_multiplies_into_its_layout(m, group, accumulate):
    n, rows, columns = 64, m // group, 64 // group
    a, b = bf16_matrix(m, 16), bf16_matrix(n, 16)
    ctas = [Cta() for _ in range(group)]
    for rank, cta in enumerate(ctas):
        a_desc = place(cta, 1024, np.ascontiguousarray(a[rank * rows : rank * rows + rows]))
        b_desc = place(cta, 32768, np.ascontiguousarray(b[rank * columns : rank * columns + columns]))
    shape = InstructionDescriptor.decode(instruction_word(m, n), "kind::f16")
    assert shape.violation(group) is None
    before = [cta.tmem.copy().view(np.float32) for cta in ctas]
    Mma(shape, group, 100, a_desc, b_desc, accumulate).execute(ctas, "fp32")
    product = numeric.bf16_to_f32(a) @ numeric.bf16_to_f32(b).T
    for row in range(0, m, 7):
        rank, r = divmod(row, rows)
        for column in range(0, n, 5):
            if rows == 128:
                cell = (r, 100 + column)
            elif group == 1:
                cell = (r % 16 + 32 * (r // 16), 100 + column)
            else:
                cell = (r + 64 * (column >= n // 2), 100 + column % (n // 2))
            expected = product[row, column] + (before[rank][cell] if accumulate else 0)
            assert ctas[rank].tmem[cell].view(np.float32) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    untouched = ctas[0].tmem[:, 300:]
    assert np.array_equal(untouched, before[0].view(np.uint32)[:, 300:])


def test_tcgen05_mma_reads_a_from_tensor_memory():
    cta, a, b = Cta(), bf16_matrix(128, 16), bf16_matrix(32, 16)
    cta.tmem[:, 8:16] = a.view(np.uint32)
    b_desc = place(cta, 1024, b)
    Mma(InstructionDescriptor.decode(instruction_word(128, 32), "kind::f16"), 1, 64, 8, b_desc, False).execute(
        [cta], "fp32"
    )
    got = np.ascontiguousarray(cta.tmem[:, 64:96]).view(np.float32)
    np.testing.assert_allclose(got, numeric.bf16_to_f32(a) @ numeric.bf16_to_f32(b).T, rtol=1e-6, atol=1e-5)


def test_tcgen05_mma_leaves_disabled_lanes_alone():
    cta, a, b = Cta(), bf16_matrix(128, 16), bf16_matrix(32, 16)
    descriptors = place(cta, 1024, a), place(cta, 32768, b)
    before = cta.tmem.copy()
    shape = InstructionDescriptor.decode(instruction_word(128, 32), "kind::f16")
    Mma(shape, 1, 64, *descriptors, False, (0, 1 << 5, 0, 1 << 31)).execute([cta], "fp32")
    for lane in (32 + 5, 96 + 31):
        assert np.array_equal(cta.tmem[lane], before[lane])
    changed = (cta.tmem[:, 64:96] != before[:, 64:96]).any(axis=1)
    assert changed.sum() == 126


@pytest.mark.parametrize(
    ("m", "n", "group", "text"),
    [(32, 64, 1, "M = 32"), (128, 8, 1, "N = 8"), (64, 64, 2, "M = 64"), (256, 48, 2, "N = 48")],
)
def test_tcgen05_shapes_outside_the_manual_are_named(m, n, group, text):
    assert text in InstructionDescriptor.decode(instruction_word(m, n), "kind::f16").violation(group)


@pytest.mark.parametrize("f16", [False, True])
def test_wgmma_from_registers_and_shared_memory_agree(f16):
    window, n = np.zeros(1 << 16, np.uint8), 24
    a, b = bf16_matrix(64, 16) if not f16 else RNG.standard_normal((64, 16)).astype(np.float16).view(np.uint16), None
    kind = "f16" if f16 else "bf16"
    b = RNG.standard_normal((n, 16)).astype(np.float16).view(np.uint16) if f16 else bf16_matrix(n, 16)
    store_box(window, 0, a, 32)
    store_box(window, 8192, b, 32)
    shape = WgmmaShape(n, kind, kind, f16)
    a_shared = shape.read_a(window, MatrixDescriptor.decode(descriptor_word(90, 0, 16, 256, 32), 90))
    words = a.view(np.uint32)
    registers = []
    for warp in range(4):
        fragment = np.zeros((4, 32), np.uint32)
        for t in range(32):
            for i in range(4):
                fragment[i, t] = words[16 * warp + t // 4 + 8 * (i & 1), t % 4 + 4 * (i >> 1)]
        registers.append(fragment)
    assert np.array_equal(a_shared, np.concatenate([shape.slab_from_registers(r) for r in registers]))
    slab = shape.read_a(window, MatrixDescriptor.decode(descriptor_word(90, 0, 16, 256, 32), 90), 2)
    assert np.array_equal(a_shared[32:48], slab)
    b_values = shape.read_b(window, MatrixDescriptor.decode(descriptor_word(90, 8192, 16, 256, 32), 90))
    d = numeric.multiply_accumulate(a_shared, b_values, None, "fp32", numeric.Product(kind, kind, f16))
    out = [fragment_maps.write_accumulator(d[16 * w : 16 * w + 16], f16) for w in range(4)]
    product = numeric.DECODE[kind](a) @ numeric.DECODE[kind](b).T
    for warp in range(4):
        assert out[warp].shape == (shape.registers, 32)
        for t in range(0, 32, 3):
            for j in range(shape.registers):
                row = 16 * warp + t // 4 + 8 * (j & 1 if f16 else (j >> 1) & 1)
                if f16:
                    low = out[warp][j, t : t + 1].view(np.float16)
                    expected = product[row, 8 * (j >> 1) + 2 * (t % 4) : 8 * (j >> 1) + 2 * (t % 4) + 2]
                    np.testing.assert_allclose(low.astype(np.float32), expected, rtol=2e-3, atol=2e-3)
                else:
                    column = 8 * (j >> 2) + 2 * (t % 4) + (j & 1)
                    assert out[warp][j, t].view(np.float32) == pytest.approx(product[row, column], rel=1e-5, abs=1e-5)
        if not f16:
            assert np.array_equal(fragment_maps.read_accumulator(out[warp], f16), d[16 * warp : 16 * warp + 16])


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix_are_inverse_and_follow_the_manual(transposed):
    matrices = RNG.integers(0, 1 << 16, (4, 8, 8), dtype=np.uint16)
    registers = fragment_maps.unpack_matrices(matrices, transposed)
    for i in range(4):
        for t in range(32):
            m = matrices[i].T if transposed else matrices[i]
            assert registers[i, t] == int(m[t // 4, 2 * (t % 4)]) | int(m[t // 4, 2 * (t % 4) + 1]) << 16
    assert np.array_equal(fragment_maps.pack_matrices(registers, transposed), matrices)


@pytest.mark.parametrize(
    ("shape", "cell"),
    [
        ("32x32b", lambda t, r, i: (t, r)),
        ("16x64b", lambda t, r, i: (t // 4 + 8 * (t % 2), 2 * r + t // 2 % 2)),
        ("16x128b", lambda t, r, i: (t // 4 + 8 * i, 4 * r + t % 4)),
        ("16x256b", lambda t, r, i: (t // 4 + 8 * (i >> 1), 8 * r + 2 * (t % 4) + (i & 1))),
    ],
)
def test_tensor_memory_transfer_cells(shape, cell):
    per, (lane, column) = tmem.registers_per_repeat(shape), tmem.transfer_cells(shape, 4)
    assert lane.shape == column.shape == (4 * per, 32)
    for index in range(4 * per):
        for t in range(32):
            assert (lane[index, t], column[index, t]) == cell(t, index // per, index % per)
    flat = set(zip(lane.ravel().tolist(), column.ravel().tolist(), strict=True))
    assert len(flat) == lane.size, "no two registers share a cell"


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("coordinates", [(0, 0, 0), (-8, 3, 1), (88, 6, 3), (100, 0, 0), (8, -2, 2)])
def test_box_load_clips_fills_and_swizzles(swizzle, coordinates):
    tensor = RNG.integers(0, 1 << 16, (5, 9, 96), dtype=np.uint16)  # dims 96, 9, 5
    inner = swizzle // 2 or 16
    tensor_map = TensorMap(4096, "bf16", 2, (96, 9, 5), (2, 192, 1728), (inner, 4, 2), (1, 1, 1), swizzle, 0, "zero")
    region = tma_box.clip(tensor_map, coordinates)
    chunks = tma_box.load_box(tensor_map, region, tensor.view(np.uint8).reshape(-1), 4096)
    window = np.zeros(16384, np.uint8)
    window.view(np.complex128)[tma_box.shared_chunks(2048, tensor_map.box_bytes, swizzle)] = chunks
    for z in range(2):
        for y in range(4):
            for x in range(inner):
                gx, gy, gz = coordinates[0] + x, coordinates[1] + y, coordinates[2] + z
                inside = 0 <= gx < 96 and 0 <= gy < 9 and 0 <= gz < 5
                address = np.array([2048 + ((z * 4 + y) * inner + x) * 2])
                got = window.view(np.uint16)[swizzle_address(address, swizzle)[0] // 2]
                assert got == (tensor[gz, gy, gx] if inside else 0)
    starts, run = region.rows()
    if not region.empty:
        assert len(starts) * run == region.nbytes


def test_out_of_bounds_elements_can_be_nan():
    tensor_map = TensorMap(0, "f16", 2, (8,), (2,), (16,), (1,), 0, 0, "nan")
    region = tma_box.clip(tensor_map, (0,))
    values = tma_box.box_elements(tensor_map, tma_box.load_box(tensor_map, region, np.zeros(16, np.uint8), 0))
    assert not np.isnan(values[:8].view(np.float16)).any()
    assert np.isnan(values[8:].view(np.float16)).all()


def test_truncating_accumulator_cuts_what_fp32_keeps():
    a = np.array([[1.0, 2.0**-13]], np.float32)
    b = np.array([[2.0**13, 2.0**-14]], np.float32)  # products 2^13 and 2^-27: far below the aligned fraction
    c = np.array([[-(2.0**13)]], np.float32)
    assert numeric.multiply_accumulate(a, b, c, "truncate", numeric.Product("bf16", "bf16"))[0, 0] == 0.0
    wide = RNG.standard_normal((8, 16)).astype(np.float32)
    exact = wide.astype(np.float64) @ wide.astype(np.float64).T
    cut = numeric.multiply_accumulate(wide, wide, None, "truncate", numeric.Product("tf32", "tf32"))
    assert np.all(np.abs(cut) <= np.abs(exact) + 1e-12 * np.abs(exact) + 2e-6)
    np.testing.assert_allclose(cut, exact, rtol=0, atol=2e-5)


def test_fp8_tables_match_torch():
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8)
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        expected = codes.view(dtype).to(torch.float32).numpy()
        np.testing.assert_array_equal(numeric.DECODE[name](np.arange(256)), expected)
