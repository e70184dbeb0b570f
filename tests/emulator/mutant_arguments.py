"""Mutants that nothing names, and why: harmless, or a blind spot of the checks.

A line of `mutants` is an identity as mutants.Mutant writes it, with the number of the instruction or a range of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

HARMLESS, BLIND_SPOT = "harmless", "blind spot"


@dataclass(frozen=True)
class Argument:
    verdict: str
    text: str
    mutants: str

    def identities(self) -> Iterator[str]:
        for line in self.mutants.strip().splitlines():
            found = re.fullmatch(r"(\S+) (\S+) (\d+)(?:-(\d+))? (.+)", line.strip())
            assert found is not None, line
            kernel, instruction, first, last, rule = found.groups()
            for number in range(int(first), int(last or first) + 1):
                yield f"{kernel} {instruction} {number} {rule}"


def argument_of(identity: str) -> Argument | None:
    return _BY_IDENTITY.get(identity)


ARGUMENTS = (
    Argument(
        BLIND_SPOT,
        "registers that tcgen05.ld brings are used before the wait: the emulator has their values at once. Where "
        "tensor memory is written again without a wait in between, strict=True names it.",
        """
        tcgen05_gemm tcgen05.wait::ld.sync.aligned 1 deleted
        tcgen05_pair tcgen05.wait::ld.sync.aligned 1 deleted
        """,
    ),
    Argument(
        HARMLESS,
        "the arrival that announces the bytes need not release anything. Those who wait read what the copy brings, "
        "and the copy's own completion orders that; nothing that the announcing thread wrote before is read after the "
        "wait.",
        """
        wgmma_gemm mbarrier.arrive.expect_tx.shared.b64 1-5 relaxed
        tcgen05_gemm mbarrier.arrive.expect_tx.shared.b64 1-5 relaxed
        tcgen05_pair mbarrier.arrive.expect_tx.shared.b64 1-5 relaxed
        multicast mbarrier.arrive.expect_tx.shared.b64 1-3 relaxed
        cancelling mbarrier.arrive.expect_tx.shared.b64 1 relaxed
        bulk_copies mbarrier.arrive.expect_tx.shared.b64 1 relaxed
        rotate_async-two mbarrier.arrive.expect_tx.shared.b64 1 relaxed
        tma_load-swizzle128 mbarrier.arrive.expect_tx.shared.b64 1 relaxed
        """,
    ),
    Argument(
        HARMLESS,
        "the compiler has split the loop, and this is the copy of the last tile: it hands back a slot that nobody "
        "fills again, so nobody waits for the arrival, and a phase in which nobody has arrived may be left behind at "
        "exit.",
        """
        wgmma_gemm mbarrier.arrive.shared.b64 3 deleted
        wgmma_gemm mbarrier.arrive.shared.b64 3 relaxed
        tcgen05_gemm tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 3 deleted
        tcgen05_pair tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 3 deleted
        tcgen05_pair tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 3 to CTA 0
        tcgen05_pair tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 3 to CTA 1
        multicast mbarrier.arrive.shared::cluster.b64 3 deleted
        multicast mbarrier.arrive.shared::cluster.b64 3 relaxed
        mbarrier_ring mbarrier.arrive.shared.b64 9 deleted
        mbarrier_ring mbarrier.arrive.shared.b64 9 relaxed
        """,
    ),
    Argument(
        HARMLESS,
        "a barrier at the end of the last tiles: everyone has read the slot, but nothing is written to it any more.",
        """
        multicast bar.sync 3 deleted
        multicast bar.sync 3 arrive only
        multicast bar.sync 3 count - 32
        cp_async bar.sync 6 deleted
        cp_async bar.sync 8 deleted
        cp_async bar.sync 10 deleted
        cp_async bar.sync 10 arrive only
        """,
    ),
    Argument(
        HARMLESS,
        "the first cluster barrier makes sure that the other CTAs run; the only thing that has to be visible after "
        "it, the initialisation of mbarriers, is released by fence.mbarrier_init, which goes with a relaxed arrival.",
        """
        rotate-two barrier.cluster.arrive 1 relaxed
        rotate_async-two barrier.cluster.arrive 1 relaxed
        multicast barrier.cluster.arrive 1 relaxed
        """,
    ),
    Argument(
        HARMLESS,
        "the last cluster barrier keeps a CTA until the others no longer reach into its shared memory; no access "
        "comes after it that would have to be ordered.",
        """
        rotate_async-two barrier.cluster.arrive 2 relaxed
        multicast barrier.cluster.arrive 2 relaxed
        """,
    ),
    Argument(
        HARMLESS,
        "each CTA has waited for all bytes that are stored into its shared memory, and its own stores take their data "
        "from registers: nobody reaches into a CTA that has come this far.",
        """
        rotate_async-two barrier.cluster.wait 2 deleted
        """,
    ),
    Argument(
        HARMLESS,
        "the kernel ends here: its end completes the stores, and the source has been read before the CTA leaves.",
        """
        tma_store-swizzle128 cp.async.bulk.wait_group 1 read
        tma_reduce-swizzle128 cp.async.bulk.wait_group 1 read
        """,
    ),
    Argument(
        HARMLESS,
        "a CTA that leaves the kernel lets dependents launch; they only start later.",
        """
        dependent griddepcontrol.launch_dependents 1 deleted
        """,
    ),
    Argument(
        HARMLESS,
        "giving up the right to allocate matters to another CTA that wants tensor memory on the same multiprocessor. "
        "This one has all of it.",
        """
        tcgen05_gemm tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned 1 deleted
        tcgen05_pair tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned 1 deleted
        """,
    ),
    Argument(
        HARMLESS,
        "between one tile and the next in this loop no register of the accumulator is touched, and wgmma.mma_async of "
        "one shape on the same accumulator are ordered without a fence; the fence of the tile before stays.",
        """
        wgmma_gemm wgmma.fence.sync.aligned 2 deleted
        """,
    ),
    Argument(
        HARMLESS,
        "the generic proxy only reads the total's semaphore and never the total: reductions follow each other within "
        "the async proxy, by the wait for the bulk group, the release and the acquire.",
        """
        bulk_reduce_in_turns fence.proxy.async.global 1 deleted
        bulk_reduce_in_turns fence.proxy.async.global 1 other space
        bulk_reduce_in_turns fence.proxy.async.global 2 deleted
        bulk_reduce_in_turns fence.proxy.async.global 2 other space
        """,
    ),
    Argument(
        BLIND_SPOT,
        "how many registers a thread needs is decided by ptxas, after the PTX: the emulator checks that the pool of "
        "the CTA suffices and that a warpgroup agrees, not that a count is enough for the code after it.",
        """
        wgmma_gemm setmaxnreg.dec.sync.aligned.u32 1 other count
        wgmma_gemm setmaxnreg.inc.sync.aligned.u32 1 deleted
        """,
    ),
    Argument(
        BLIND_SPOT,
        "generic reads before an asynchronous write of the same bytes are taken as ordered by the barrier between "
        "them, as every TMA ring takes them; the manual's example for clusterlaunchcontrol has a proxy fence there.",
        """
        cancelling fence.proxy.async.shared::cta 1 deleted
        cancelling fence.proxy.async.shared::cta 1 other space
        """,
    ),
    Argument(
        BLIND_SPOT,
        "ldmatrix is executed by the whole warp at once, so what its lanes stored before counts as ordered; the "
        "manual promises that for bar.warp.sync only.",
        """
        warp_mma bar.warp.sync 1 deleted
        """,
    ),
)
_BY_IDENTITY = {identity: argument for argument in ARGUMENTS for identity in argument.identities()}
