"""Mutants of the backward that nothing names, and why. Regenerate with `python -m kernels.sm100.mutants`, in tests/."""

from __future__ import annotations

from emulator.mutant_arguments import BLIND_SPOT, HARMLESS, Argument

ARGUMENTS = (
    Argument(
        HARMLESS,
        "no other CTA wants tensor memory of this multiprocessor: one CTA fills its shared memory.",
        """
        causal tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned 1 deleted
        ordered tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned 1 deleted
        """,
    ),
    Argument(
        HARMLESS,
        "the empty barriers of dP and dS: the table of storage.py has no arrival there, and nobody waits.",
        """
        causal mbarrier.init.shared.b64 16 deleted
        causal mbarrier.init.shared.b64 16 count + 1
        causal mbarrier.init.shared.b64 18 deleted
        causal mbarrier.init.shared.b64 18 count + 1
        ordered mbarrier.init.shared.b64 16 deleted
        ordered mbarrier.init.shared.b64 16 count + 1
        ordered mbarrier.init.shared.b64 18 deleted
        ordered mbarrier.init.shared.b64 18 count + 1
        """,
    ),
    Argument(
        BLIND_SPOT,
        "how many registers a warp may use: the emulator gives each warp all that the PTX names. What ptxas was told "
        "is asserted in test_static.py.",
        """
        causal setmaxnreg.inc.sync.aligned.u32 1 deleted
        causal setmaxnreg.inc.sync.aligned.u32 2 deleted
        causal setmaxnreg.dec.sync.aligned.u32 1 other count
        ordered setmaxnreg.inc.sync.aligned.u32 1 deleted
        ordered setmaxnreg.inc.sync.aligned.u32 2 deleted
        ordered setmaxnreg.dec.sync.aligned.u32 1 other count
        """,
    ),
    Argument(
        HARMLESS,
        "the reduce role's last wait: shared memory must outlive the reads of the last reduce-adds, that is all; the "
        "end of the kernel publishes the sums. In turns (ordered) every step has waited already.",
        """
        causal cp.async.bulk.wait_group 1 read
        ordered cp.async.bulk.wait_group 2 deleted
        ordered cp.async.bulk.wait_group 2 one group more
        ordered cp.async.bulk.wait_group 2 read
        """,
    ),
    Argument(
        HARMLESS,
        "the ring of LSE has the stages of Q's ring, and a stage of Q is released by products that waited for dS of "
        "its step, which every compute warp announces after it has read the LSE: whoever fills a stage of LSE has "
        "waited for that already.",
        """
        causal mbarrier.arrive.shared.b64 2 relaxed
        causal mbarrier.try_wait.parity.shared.b64 19 deleted
        causal mbarrier.try_wait.parity.shared.b64 19 relaxed
        ordered mbarrier.arrive.shared.b64 2 relaxed
        ordered mbarrier.try_wait.parity.shared.b64 19 deleted
        ordered mbarrier.try_wait.parity.shared.b64 19 relaxed
        """,
    ),
    Argument(
        HARMLESS,
        "that dV and dK of the last tile have left tensor memory: compute warps store P of the next tile only after "
        "that, and its first dV waits for P.",
        """
        causal mbarrier.arrive.shared.b64 6 relaxed
        causal mbarrier.try_wait.parity.shared.b64 10 deleted
        causal mbarrier.try_wait.parity.shared.b64 10 relaxed
        ordered mbarrier.arrive.shared.b64 6 relaxed
        ordered mbarrier.try_wait.parity.shared.b64 10 deleted
        ordered mbarrier.try_wait.parity.shared.b64 10 relaxed
        """,
    ),
    Argument(
        BLIND_SPOT,
        "registers that tcgen05.ld brings are used before the wait. The emulator has their values at once; another "
        "wait comes before tensor memory is written again, so that no access is out of order.",
        """
        causal tcgen05.wait::ld.sync.aligned 5-7 deleted
        ordered tcgen05.wait::ld.sync.aligned 5-7 deleted
        """,
    ),
    Argument(
        HARMLESS,
        "the arrival that announces the bytes need not release anything: those who wait read what the copy brings, and "
        "its own completion orders that.",
        """
        causal mbarrier.arrive.expect_tx.shared.b64 1-4 relaxed
        ordered mbarrier.arrive.expect_tx.shared.b64 1-4 relaxed
        """,
    ),
    Argument(
        BLIND_SPOT,
        "proxy fences of a turn. What they order are asynchronous reductions with each other, by way of a semaphore "
        "of the generic proxy; the check asks for a fence between generic writes and asynchronous reads alone.",
        """
        ordered fence.proxy.async.global 1 deleted
        ordered fence.proxy.async.global 1 other space
        ordered fence.proxy.async.global 2 deleted
        ordered fence.proxy.async.global 2 other space
        ordered fence.proxy.async.global 3 deleted
        ordered fence.proxy.async.global 3 other space
        ordered fence.proxy.async.global 4 deleted
        ordered fence.proxy.async.global 4 other space
        """,
    ),
    Argument(
        HARMLESS,
        "in turns, a step or a tile ends with a wait until its adds are complete: staging is free when the next one "
        "begins, and with as many chunks as buffers (head dimension 64) no buffer is used twice in between.",
        """
        ordered cp.async.bulk.wait_group.read 1 deleted
        ordered cp.async.bulk.wait_group.read 1 one group more
        ordered cp.async.bulk.wait_group.read 2 deleted
        ordered cp.async.bulk.wait_group.read 2 one group more
        ordered bar.sync 5 deleted
        ordered cp.async.bulk.wait_group.read 3 deleted
        ordered cp.async.bulk.wait_group.read 3 one group more
        ordered bar.sync 7 deleted
        """,
    ),
    Argument(
        HARMLESS,
        "the first chunk's add joins the group of the second, and the step waits for both.",
        "ordered cp.async.bulk.commit_group 1 deleted",
    ),
)
BY_IDENTITY = {identity: argument for argument in ARGUMENTS for identity in argument.identities()}
