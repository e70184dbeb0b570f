"""Capture of launches: every calling convention, both architectures, and nothing left behind."""

from __future__ import annotations

import importlib.metadata
import struct
from dataclasses import dataclass

import numpy as np
import pytest
import torch

cutlass = pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import cuda.bindings.driver as cuda  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream, make_ptr  # noqa: E402

from emulator.kernels import elementwise as kernels  # noqa: E402
from emulator.recorder import recording  # noqa: E402
from refluent.emulator import DriverError, cudart, driver  # noqa: E402
from refluent.emulator.errors import EmulatorError  # noqa: E402

pytestmark = pytest.mark.emulator
N = 300
ARCHES = ("sm_90a", "sm_100a")


@pytest.fixture
def xy():
    return torch.randn(N), torch.randn(N)


def fake_tensors():
    n = cute.sym_int()
    return [make_fake_compact_tensor(cutlass.Float32, (n,)) for _ in range(2)]


def call_plain(x, y):
    kernels.axpy(from_dlpack(x), from_dlpack(y), 2.0, N)


def call_untyped(x, y):
    kernels.axpy_untyped(x, y, 2.0, N)


def call_numpy(x, y):
    kernels.axpy_untyped(x.numpy(), y.numpy(), 2.0, N)


def call_compiled(x, y):
    compiled = cute.compile(kernels.axpy, from_dlpack(x), from_dlpack(y), 2.0, N)
    compiled(from_dlpack(x), from_dlpack(y), 2.0, N)


def call_stream(x, y):
    compiled = cute.compile(kernels.axpy_on_stream, from_dlpack(x), from_dlpack(y), 2.0, N, cuda.CUstream(0))
    compiled(from_dlpack(x), from_dlpack(y), 2.0, N, cuda.CUstream(7))


def call_fake(x, y):
    compiled = cute.compile(kernels.axpy, *fake_tensors(), 2.0, N)
    compiled(from_dlpack(x), from_dlpack(y), 2.0, N)


def call_pointers(x, y):
    pointers = [make_ptr(cutlass.Float32, t.data_ptr(), cute.AddressSpace.gmem) for t in (x, y)]
    kernels.axpy_pointers(*pointers, 2.0, N)


def call_tvm_ffi(x, y):
    compiled = cute.compile(kernels.axpy, *fake_tensors(), cutlass.Float32(2.0), cutlass.Int32(N), options=TVM)
    compiled(x, y, 2.0, N)


def call_tvm_ffi_real(x, y):
    arguments = [from_dlpack(t, enable_tvm_ffi=True).mark_layout_dynamic() for t in (x, y)]
    compiled = cute.compile(kernels.axpy, *arguments, cutlass.Float32(2.0), cutlass.Int32(N), options=TVM)
    compiled(x, y, 2.0, N)


def call_tvm_ffi_numpy(x, y):
    compiled = cute.compile(kernels.axpy, *fake_tensors(), cutlass.Float32(2.0), cutlass.Int32(N), options=TVM)
    compiled(x.numpy(), y=y.numpy(), a=2.0, n=N)


def call_tvm_ffi_stream(x, y):
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    arguments = (*fake_tensors(), cutlass.Float32(2.0), cutlass.Int32(N), stream)
    cute.compile(kernels.axpy_on_stream, *arguments, options=TVM)(x, y, 2.0, N)


TVM = "--enable-tvm-ffi"
CONVENTIONS = [value for name, value in sorted(globals().items()) if name.startswith("call_")]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("call", CONVENTIONS, ids=lambda f: f.__name__.removeprefix("call_"))
def test_calling_conventions(call, arch, xy):
    x, y = xy
    with recording(arch) as gpu:
        call(x, y)
    (launch,) = gpu.recorder.launches
    assert launch.grid == (3, 1, 1)
    assert launch.block == (128, 1, 1)
    assert launch.cluster == (1, 1, 1)
    assert launch.stream == (7 if call is call_stream else 0)
    assert launch.arch == arch
    assert f".target {arch}" in launch.ptx
    assert f".entry {launch.kernel}" in launch.ptx
    assert "ld.global" in launch.ptx  # pointers to global memory, not generic ones
    assert ".loc" in launch.ptx
    assert struct.unpack("<Q", launch.params[0][:8]) == (x.data_ptr(),)
    assert struct.unpack("<Q", launch.params[1][:8]) == (y.data_ptr(),)
    assert launch.params[2:] == (struct.pack("<f", 2.0), struct.pack("<i", N))
    assert {(a.address, a.nbytes) for a in launch.allocations} == {(t.data_ptr(), 4 * N) for t in xy}
    assert gpu.recorder.synchronized == 1


def test_both_architectures_in_one_process(xy):
    for arch in (*ARCHES, *ARCHES):
        with recording(arch) as gpu:
            call_plain(*xy)
            assert f".target {arch}" in gpu.recorder.launches[0].ptx


@pytest.mark.parametrize("options", [None, TVM])
def test_compiled_functions_outlive_their_context(options, xy):
    x, y = xy
    with recording("sm_90a"):
        compiled = cute.compile(
            kernels.axpy, *fake_tensors(), cutlass.Float32(2.0), cutlass.Int32(N), options=options or ""
        )

    def call():
        compiled(*((x, y) if options else (from_dlpack(x), from_dlpack(y))), 2.0, N)

    for _ in range(2):
        with recording("sm_90a") as gpu:
            call()
            assert len(gpu.recorder.launches) == 1
    with recording("sm_100a") as gpu:
        with pytest.raises(DriverError, match="compiled for sm_90a; the emulated chip is sm_100a"):
            call()
        assert not gpu.recorder.launches


def test_called_outside_is_refused(xy):
    with recording("sm_90a"):
        compiled = cute.compile(kernels.axpy, *fake_tensors(), 2.0, N)
        arguments = [from_dlpack(t) for t in xy]
    with pytest.raises(Exception, match="runs inside such a context only"):
        compiled(*arguments, 2.0, N)


def test_several_launches_attributes_and_order(xy):
    with recording("sm_100a") as gpu:
        kernels.axpy_twice(from_dlpack(xy[0]), from_dlpack(xy[1]), 2.0, N)
    first, second = gpu.recorder.launches
    assert (first.cluster, first.programmatic, first.shared_bytes) == ((1, 1, 1), False, 0)
    assert (second.cluster, second.programmatic, second.shared_bytes) == ((2, 1, 1), True, 2048)
    assert second.grid == (4, 1, 1)
    assert gpu.recorder.synchronized == 1


def test_bad_launch_is_refused_and_nothing_stays_pending(xy):
    x, y = (from_dlpack(t) for t in xy)
    with recording("sm_90a") as gpu:
        with pytest.raises(DriverError, match=r"grid \(3, 1, 1\) is not a multiple of the cluster \(2, 1, 1\)"):
            kernels.axpy_then_bad(x, y, 2.0, N)
        assert not gpu.recorder.launches
        kernels.axpy(from_dlpack(xy[0]), from_dlpack(xy[1]), 2.0, N)
        assert len(gpu.recorder.launches) == 1


def test_storages_not_views(xy):
    """A packed batch is one storage: kernels may add offsets to the pointer of a slice."""
    x, y = xy
    with recording("sm_90a") as gpu:
        kernels.axpy(from_dlpack(x[100:].detach()), from_dlpack(y[:200]), 2.0, 100)
    (launch,) = gpu.recorder.launches
    assert struct.unpack("<Q", launch.params[0][:8]) == (x.data_ptr() + 400,)
    assert {(a.address, a.nbytes) for a in launch.allocations} == {(t.data_ptr(), 4 * N) for t in xy}


def test_each_call_has_its_own_memory(xy):
    x, y = xy
    z = torch.randn(N)
    with recording("sm_90a") as gpu:
        compiled = cute.compile(kernels.axpy, *fake_tensors(), cutlass.Float32(2.0), cutlass.Int32(N), options=TVM)
        compiled(x, y, 2.0, N)
        compiled(x, z, 2.0, N)
    first, second = ({a.address for a in launch.allocations} for launch in gpu.recorder.launches)
    assert first == {x.data_ptr(), y.data_ptr()}
    assert second == {x.data_ptr(), z.data_ptr()}


def test_unknown_pointers_are_refused_until_named():
    x, y = np.zeros(N, np.float32), np.zeros(N, np.float32)
    pointers = [make_ptr(cutlass.Float32, a.ctypes.data, cute.AddressSpace.gmem) for a in (x, y)]
    with recording("sm_90a") as gpu:
        with pytest.raises(DriverError, match="no tensor that holds it was seen"):
            kernels.axpy_pointers(*pointers, 2.0, N)
        gpu.hand_in(x)
        gpu.hand_in(y)
        kernels.axpy_pointers(*pointers, 2.0, N)
    assert {a.address for a in gpu.recorder.launches[0].allocations} == {x.ctypes.data, y.ctypes.data}


def test_memory_that_nothing_wrote_is_known(xy):
    with recording("sm_90a") as gpu:
        fresh, zeroed, filled = torch.empty(N), torch.zeros(N), torch.empty(N)
        filled.normal_()
        view = torch.empty(N)
        view[:10] = 1.0
        through_numpy = torch.empty(N)
        through_numpy.numpy()[:] = 1.0
        for tensor in (fresh, zeroed, filled, view, through_numpy):
            kernels.axpy(from_dlpack(xy[0]), from_dlpack(tensor), 2.0, N)
        found = [launch.allocations[1].fresh for launch in gpu.recorder.launches]
    assert found == [True, False, False, False, False]


def test_one_context_at_a_time(xy):
    with recording("sm_90a") as outer:
        with pytest.raises(DriverError, match="leave the first context"), recording("sm_100a"):
            pass
        call_plain(*xy)
        assert outer.recorder.launches[0].arch == "sm_90a"
    with pytest.raises(DriverError, match="has been used"), outer:
        pass


def test_unknown_dsl_version_is_refused(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "4.9.0" if name == "nvidia-cutlass-dsl" else real(name)
    )
    refused = pytest.raises(DriverError, match=r"nvidia-cutlass-dsl 4\.9\.0 is installed; .* knows .* 4\.8\.1 only")
    with refused, recording("sm_90a"):
        pass
    assert cudart.active() is None


def watched():
    """Every attribute that the context replaces, to see that all come back."""
    from cutlass.base_dsl import compile_backend, compiler, dsl, env_manager, jit_executor
    from cutlass.cute import runtime
    from cutlass.cutlass_dsl import cuda_jit_executor, tvm_ffi_provider

    owners = [
        torch.Tensor,
        torch.cuda,
        torch,
        cuda,
        compile_backend,
        compiler.Compiler,
        compiler.CompileOptions,
        dsl.BaseDSL,
        env_manager.EnvironmentVarManager,
        jit_executor.ExecutionArgs,
        jit_executor.JitExecutor,
        jit_executor._RuntimePointerArg,
        runtime,
        runtime._Tensor,
        runtime._Pointer,
        cuda_jit_executor.CudaDialectJitCompiledFunction,
        tvm_ffi_provider.TVMFFIJitCompiledFunction,
        tvm_ffi_provider.TVMFFIJitCompiledFunctionBase,
        tvm_ffi_provider.TVMFFIJitCompiledFunctionWithKwargs,
    ]
    return {(id(owner), name): value for owner in owners for name, value in vars(owner).items()}


class Oops(Exception):
    pass


@pytest.mark.parametrize("how", ["plainly", "by exception", "by failing to enter"])
def test_nothing_is_left_behind(how, xy, monkeypatch):
    before = watched()
    if how == "plainly":
        with recording("sm_90a"):
            call_plain(*xy)
    elif how == "by exception":
        with pytest.raises(Oops), recording("sm_90a"):
            raise Oops
    else:
        monkeypatch.setattr(driver, "_install_tvm_ffi", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError), recording("sm_90a"):
            pass
    after = watched()
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key]] == []
    assert cudart.active() is None
    assert xy[0].device == torch.device("cpu")


def test_tensors_answer_as_cuda_tensors_inside_only():
    x = torch.ones(3)
    with recording("sm_90a", num_sms=16):
        assert x.is_cuda
        assert not x.is_cpu
        assert x.device == torch.device("cuda", 0)
        made = [
            torch.empty(2, device="cuda"),
            torch.zeros(2, device=x.device),
            torch.tensor([1.0, 2.0], device="cuda:0"),
            torch.randn(2).cuda(),
            torch.arange(2).to("cuda"),
            x.new_ones(2),
            torch.nn.Linear(2, 2).to("cuda").weight,
        ]
        assert all(t.is_cuda for t in made)
        copy = x.cpu()
        x.add_(1)
        assert copy.tolist() == [1, 1, 1]
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.get_device_properties(None).multi_processor_count == 16
        assert torch.cuda.current_stream().cuda_stream == 0
        with torch.cuda.device(0):
            torch.cuda.synchronize()
        assert cutlass.utils.HardwareInfo().get_max_active_clusters(2) == 8
        assert cutlass.utils.HardwareInfo().get_device_multiprocessor_count() == 16
    assert all(not t.is_cuda for t in [x, *made])


def test_autograd_functions_run_as_ever():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.empty(x.shape, device=x.device).copy_(x) * 2

        @staticmethod
        def backward(ctx, grad):
            return torch.full(grad.shape, 2.0, device=grad.device) * grad

    with recording("sm_100a"):
        x = torch.ones(3, requires_grad=True, device="cuda")
        Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_containers_of_tensors_reach_a_tvm_ffi_call(xy):
    from refluent.emulator.handed import HandedIn

    @dataclass(frozen=True)
    class Pair:
        x: torch.Tensor
        scale: float

    handed = HandedIn()
    converted = handed.converted([Pair(xy[0], 2.0), (xy[1], None, 3)])
    assert converted[0].x.device.type == "cuda"
    assert converted[0].scale == 2.0
    assert converted[1][1:] == (None, 3)
    assert {a.address for a in handed.allocations()} == {t.data_ptr() for t in xy}


def test_ptx_is_found_by_content():
    """Two kernels of one name, compiled apart: each launch has the PTX of its own."""
    sources = []
    for scale in (2.0, 3.0):

        @cute.kernel
        def same_name(x: cute.Tensor):
            x[cute.arch.thread_idx()[0]] = cutlass.Float32(scale)  # noqa: B023

        @cute.jit
        def host(x: cute.Tensor):
            same_name(x).launch(grid=[1, 1, 1], block=[32, 1, 1])

        with recording("sm_90a") as gpu:
            host(from_dlpack(torch.zeros(32)))
        sources.append(gpu.recorder.launches[0])
    assert sources[0].kernel == sources[1].kernel
    assert "0f40000000" in sources[0].ptx or "1073741824" in sources[0].ptx
    assert sources[0].ptx != sources[1].ptx


def test_errors_are_emulator_errors():
    assert issubclass(DriverError, EmulatorError)
