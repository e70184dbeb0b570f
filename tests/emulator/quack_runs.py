"""quack's public functions on an emulated chip, for a process of their own: its caches do not name the architecture."""

from __future__ import annotations

import torch

from refluent import accuracy, emulator


def within(got, expected, dtype=torch.bfloat16):
    unit = accuracy.UNIT[dtype]
    bound = 2 * unit * expected.double().abs() + 2 * unit * expected.double().abs().max() * 0.1
    assert ((got.double() - expected.double()).abs() <= bound).all()


def run(arch):
    """The findings of one run of each function; raises if a result is wrong."""
    import quack.cache
    from quack.cross_entropy import cross_entropy
    from quack.gemm_interface import gemm
    from quack.rmsnorm import rmsnorm
    from quack.softmax import softmax

    quack.cache.CACHE_ENABLED = False  # the object files that it keeps on disk hold no PTX
    torch.manual_seed(0)
    x, weight, target = torch.randn(33, 512).bfloat16(), torch.randn(512), torch.randint(0, 512, (33,))
    a, b = torch.randn(200, 128).bfloat16(), torch.randn(128, 264).bfloat16()
    wide = x.double()
    with emulator.gpu(arch, on_finding="record") as chip:
        normed, soft, product = rmsnorm(x, weight), softmax(x), gemm(a, b, tuned=False)
        loss = cross_entropy(x, target, reduction="none")
    within(normed, wide * torch.rsqrt((wide**2).mean(-1, keepdim=True) + 1e-6) * weight)
    within(soft, wide.softmax(-1))
    within(product, a.double() @ b.double())
    expected = torch.nn.functional.cross_entropy(wide, target, reduction="none")
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    return chip.report().findings
