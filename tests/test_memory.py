"""No S x S tensor, ever: the peak memory of long calls, each in a process of its own."""

import subprocess
import sys
import textwrap

import pytest

LENGTH = 16384
BOUND_MB = 100  # a boolean (S, S) tensor is 268 MB, a float32 one 1074 MB

PROGRAM = """
import re
import torch
import refluent as rf

torch.set_num_threads(1)

def peak_mb():  # of this program: getrusage's figure begins at what pytest, which started it, held
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

def run(n):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 16).requires_grad_() for _ in range(3))
    sink = torch.zeros(1, requires_grad=True)
    slope = torch.full((1,), -0.1, requires_grad=True)
    cu = torch.tensor([0, n], dtype=torch.int32)
    {call}
    o.sum().backward()
    assert torch.isfinite(q.grad).all()

run(1024)
before = peak_mb()
run({length})
print(peak_mb() - before)
"""

CALLS = {
    "causal": "o = rf.attention(q, k, v, causal=True)",
    "window, softcap and sink": "o = rf.attention(q, k, v, window=(100, 100), softcap=5.0, sink=sink)",
    "score_mod": "o = rf.attention(q, k, v, window=(300, 0), score_mod=lambda s, b, h, i, j: s + slope[h] * (i - j))",
    "mask_mod": "o = rf.attention(q, k, v, window=(300, 0), mask_mod=lambda b, h, i, j: (i + j) % 2 == 0)",
    "dropout": "o = rf.attention(q, k, v, window=(300, 0), dropout_p=0.1)",
    "varlen": """o = rf.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=n,
                            max_seqlen_k=n, window=(300, 0))""",
    "block mask": """bm = rf.create_block_mask(lambda b, h, i, j: (i - j).abs() < 128, None, None, n, n)
    o = rf.attention(q, k, v, block_mask=bm)""",
    "deterministic": "o = rf.attention(q, k, v, window=(300, 0), softcap=5.0, deterministic=True)",
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", CALLS)
def test_peak_memory(name):
    program = textwrap.dedent(PROGRAM).format(call=CALLS[name], length=LENGTH)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < BOUND_MB
