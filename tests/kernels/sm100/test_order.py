"""Which tiles there are, which query blocks each walks and in which order they add, by counting: no emulator.

The device code's functions are compiled for the host and tabulated for many lengths and windows at once; plain Python
says for every single query and key what they must give.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack

from refluent.gpu.device.seqlen import Side, workspace_blocks
from refluent.gpu.device.visible import Window
from refluent.gpu.device.work import Call, Order

HEADS, GROUP = 3, 3
FACTS = 9  # columns before the ranks, see Tabulate
SMALL, REAL = ((4, 4), (2, 4), (4, 2)), ((128, 128), (64, 128), (64, 64))


class Tabulate:
    """Fills tables of tiles and ranks, and of the blocks of keys that visit a block of queries."""

    def __init__(self, tile_m, tile_n, has_left, has_right, cluster):
        self.tile_m, self.tile_n, self.cluster = tile_m, tile_n, cluster
        self.has_left, self.has_right = has_left, has_right

    @cute.jit
    def __call__(
        self,
        tiles: cute.Tensor,
        visitors: cute.Tensor,
        used_q: cute.Tensor,
        used_k: cute.Tensor,
        longest_q: cutlass.Int32,
        longest_k: cutlass.Int32,
        left: cutlass.Int32,
        right: cutlass.Int32,
        bundle: cutlass.Int32,
    ):
        batch = used_q.shape[0]
        queries, keys = Side(None, used_q, longest_q, longest_q), Side(None, used_k, longest_k, longest_k)
        window = Window(left, right, self.has_left, self.has_right)
        heads, scale = cutlass.Int32(HEADS), cutlass.Float32(1)
        m, n = self.tile_m, self.tile_n
        order = Order.make(keys, batch, heads, n * self.cluster, bundle)
        call = Call(queries, keys, window, heads, batch, scale, GROUP, m, n, self.cluster, order)
        for index in cutlass.range(call.tiles()):
            tile = call.tile(index)
            row = tiles[index, None]
            row[0], row[1], row[2], row[3] = tile.batch, tile.head, tile.kv_head, tile.n_block
            row[4], row[5] = tile.m_begin, tile.m_end
            row[6] = cutlass.Int32(1) if tile.exists else cutlass.Int32(0)
            row[7], row[8] = tile.own_begin, tile.own_end
            for m_block in cutlass.range(tile.own_begin, tile.own_end):
                row[FACTS + m_block] = call.rank(tile, m_block)
        for b in cutlass.range(batch):
            len_q, len_k = queries.length(b), keys.length(b)
            for m_block in cutlass.range((len_q + self.tile_m - 1) // self.tile_m):
                begin, end = window.key_blocks(m_block * self.tile_m, self.tile_m, self.tile_n, len_q, len_k)
                visitors[b, m_block, 0], visitors[b, m_block, 1] = begin, end


@cache
def compiled(tile_m, tile_n, has_left, has_right, cluster):
    """Lengths of tables are dynamic: one function for all lengths and windows."""
    table, ends, used = (torch.zeros(shape, dtype=torch.int32) for shape in ((2, 2), (2, 2, 2), (2,)))
    numbers = [cutlass.Int32(0)] * 5
    entry = Tabulate(tile_m, tile_n, has_left, has_right, cluster)
    dynamic = [from_dlpack(t).mark_layout_dynamic() for t in (table, ends, used, used)]
    return cute.compile(entry, *dynamic, *numbers)


@dataclass(frozen=True)
class Tile:
    index: int
    batch: int
    head: int
    kv_head: int
    n_block: int
    m_begin: int
    m_end: int
    exists: bool
    own_begin: int
    own_end: int
    ranks: tuple[int, ...]

    @property
    def adds_to(self):
        return range(self.own_begin, self.own_end)


def tabulate(tile_m, tile_n, window, lengths, cluster, bundle):
    """Tiles in launch order, and (batch, m_block) -> (begin, end) of key blocks."""
    left, right = window
    longest_q, longest_k = (max(1, *side) for side in zip(*lengths))
    blocks_m, blocks_n = -(-longest_q // tile_m), -(-longest_k // tile_n)
    tiles = torch.full(
        (-(-blocks_n // cluster) * cluster * HEADS * len(lengths), FACTS + blocks_m), -1, dtype=torch.int32
    )
    visitors = torch.full((len(lengths), blocks_m, 2), -1, dtype=torch.int32)
    used = [torch.tensor(side, dtype=torch.int32) for side in zip(*lengths)]
    function = compiled(tile_m, tile_n, left is not None, right is not None, cluster)
    tensors = [from_dlpack(t).mark_layout_dynamic() for t in (tiles, visitors, *used)]
    function(*tensors, longest_q, longest_k, left or 0, right or 0, bundle)
    rows = []
    for index, row in enumerate(tiles.tolist()):
        batch, head, kv_head, n_block, begin, end, exists, own_begin, own_end = row[:FACTS]
        ranks = tuple(row[FACTS + own_begin : FACTS + own_end])
        rows.append(Tile(index, batch, head, kv_head, n_block, begin, end, bool(exists), own_begin, own_end, ranks))
    return rows, visitors.tolist()


def sees(window, len_q, len_k, i, j):
    """semantics.md, point 4."""
    left, right = window
    at = i + len_k - len_q
    return (left is None or j >= at - left) and (right is None or j <= at + right)


def visible_blocks(tile_m, tile_n, window, len_q, len_k):
    """(m, n) of blocks in which some query sees some key."""
    return {
        (i // tile_m, j // tile_n) for i, j in product(range(len_q), range(len_k)) if sees(window, len_q, len_k, i, j)
    }


def check_clusters(tiles, tile_n, lengths, cluster):
    """The tiles of a cluster walk together, whatever one of them needs and no more."""
    for first in range(0, len(tiles), cluster):
        together = tiles[first : first + cluster]
        assert len({(t.batch, t.head, t.m_begin, t.m_end) for t in together}) == 1
        walked = set(range(together[0].m_begin, together[0].m_end))
        assert walked == set().union(*(t.adds_to for t in together))
        blocks = sorted(t.n_block for t in together)
        assert blocks == list(range(blocks[0], blocks[0] + cluster))
        assert blocks[0] % cluster == 0
        if walked:  # what does not exist has no keys to read
            assert all(t.exists or t.n_block * tile_n >= lengths[t.batch][1] for t in together)


def check(tile_m, tile_n, window, lengths, visible, cluster=1, bundle=1):
    tiles, visitors = tabulate(tile_m, tile_n, window, lengths, cluster, bundle)
    check_clusters(tiles, tile_n, lengths, cluster)
    assert [t.head // bundle for t in tiles] == sorted(t.head // bundle for t in tiles)
    by_sequence = {}
    for tile in tiles:
        by_sequence.setdefault((tile.batch, tile.head), []).append(tile)
    assert len(by_sequence) == len(lengths) * HEADS
    for (batch, _), own in by_sequence.items():
        len_q, len_k = lengths[batch]
        there = [tile for tile in own if tile.exists]
        assert sorted(tile.n_block for tile in there) == list(range(-(-len_k // tile_n)))
        assert not any(tile.adds_to for tile in own if not tile.exists)
        assert all(tile.kv_head == tile.head // GROUP for tile in own)
        walked = {(m, tile.n_block) for tile in there for m in tile.adds_to}
        visits = {(m, n) for m in range(-(-len_q // tile_m)) for n in range(*visitors[batch][m])}
        assert walked == visits, (window, len_q, len_k)  # each is the other's inverse
        needed = visible(tile_m, tile_n, window, len_q, len_k)
        assert needed <= walked, (window, len_q, len_k)
        assert walked <= needed, (window, len_q, len_k)  # and no tile is walked in vain
        for m in {m for m, _ in walked}:
            # ranks of the visitors in launch order: whoever adds before has started before
            visiting = [tile for tile in own if m in tile.adds_to]
            assert [tile.ranks[m - tile.own_begin] for tile in visiting] == list(range(len(visiting)))
    # grouped heads add to a key block in the order of their heads
    for head_block in {(t.batch, t.kv_head, t.n_block) for t in tiles if t.exists}:
        adding = [t for t in tiles if t.exists and (t.batch, t.kv_head, t.n_block) == head_block]
        assert [t.head % GROUP for t in adding] == list(range(GROUP))


SIDES = ((None, None), (None, 0), (None, 3), (0, None), (5, None), (0, 0), (2, 1), (6, 9), (1, 0))


@pytest.mark.parametrize(("cluster", "bundle"), [(1, 1), (1, 2), (2, 2), (2, 3)])
@pytest.mark.parametrize("window", SIDES, ids=str)
@pytest.mark.parametrize("tile", SMALL, ids=str)
def test_every_short_length(tile, window, cluster, bundle):
    lengths = list(product(range(14), range(14)))
    check(*tile, window, lengths, visible_blocks, cluster, bundle)


@cache
def few_visible(tile_m, tile_n, window, len_q, len_k):
    """The same for long sequences, a block of rows at a time."""
    i = torch.arange(len_q)[:, None] + len_k - len_q
    j = torch.arange(len_k)[None, :]
    left, right = window
    seen = torch.ones(len_q, len_k, dtype=torch.bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    found = seen.nonzero() // torch.tensor([tile_m, tile_n])
    return {(m, n) for m, n in found.unique(dim=0).tolist()}


@pytest.mark.parametrize("window", [(None, None), (None, 0), (100, 0), (129, 60), (0, 300), (200, None)], ids=str)
@pytest.mark.parametrize("tile", REAL, ids=str)
@pytest.mark.parametrize(("cluster", "bundle"), [(1, 3), (2, 2)])
def test_real_tiles(tile, window, cluster, bundle):
    lengths = [(q, k) for q in (0, 1, 128, 257, 700) for k in (0, 1, 127, 384, 901)]
    check(*tile, window, lengths, few_visible, cluster, bundle)


class Progress:
    """A deterministic call, step by step: a step adds in its turn, and needs the one before from the whole cluster.

    Stricter than the kernel, whose products run ahead of its adds.
    """

    def __init__(self, tiles, cluster):
        self.clusters = [tiles[first : first + cluster] for first in range(0, len(tiles), cluster)]
        self.done = [[0] * cluster for _ in self.clusters]  # steps, and one more for dK and dV
        self.turns = Counter()

    def ended(self, number):
        return all(done > t.m_end - t.m_begin for done, t in zip(self.done[number], self.clusters[number]))

    def advance(self, number):
        """Whether any tile of the cluster took a step."""
        done, moved = self.done[number], False
        for rank, tile in enumerate(self.clusters[number]):
            steps, m = tile.m_end - tile.m_begin, tile.m_begin + done[rank]
            if done[rank] > steps or min(done) < done[rank] < steps:
                continue
            if done[rank] < steps:
                counter, turn = (
                    (tile.batch, tile.head, m),
                    tile.ranks[m - tile.own_begin] if m in tile.adds_to else None,
                )
            else:
                counter, turn = (tile.batch, tile.kv_head, "block", tile.n_block), tile.head % GROUP
                turn = turn if tile.adds_to else None
            if turn is None or self.turns[counter] == turn:
                self.turns[counter] += turn is not None
                done[rank] += 1
                moved = True
        return moved

    def finish(self, places, persistent):
        """Whether all clusters end, `places` at a time, in order; persistent: each place has every so many."""
        mine = [deque(range(p, len(self.clusters), places)) for p in range(places)]
        if not persistent:
            mine = [deque(range(len(self.clusters)))] * places  # one queue
        running = [None] * places
        moved = True
        while moved:
            moved = False
            for place in range(places):
                if running[place] is None and mine[place]:
                    running[place] = mine[place].popleft()
                if running[place] is not None:
                    moved |= self.advance(running[place])
                    if self.ended(running[place]):
                        running[place] = None
                        moved = True
        return running == [None] * places and not any(mine)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("cluster", "bundle"), [(1, 1), (1, 3), (2, 1), (2, 2), (2, 3)])
@pytest.mark.parametrize("window", SIDES, ids=str)
def test_nobody_waits_for_ever(window, cluster, bundle, persistent):
    tiles, _ = tabulate(2, 4, window, [(9, 17), (3, 0), (12, 10), (0, 5), (10, 21)], cluster, bundle)
    for places in (1, 2, 3, 5, 64):
        assert Progress(tiles, cluster).finish(places, persistent), places


@cute.jit
def block_offsets(out: cute.Tensor, cu_seqlens: cute.Tensor, tokens: cutlass.Int32, tile: cutlass.Constexpr):
    side = Side(cu_seqlens, None, tokens, tokens)
    for batch in cutlass.range(out.shape[0]):
        out[batch] = side.block_offset(batch, tile)


@pytest.mark.parametrize("tile", [64, 128])
def test_sequences_do_not_share_blocks_of_a_workspace(tile):
    generator, firsts, offsets = torch.Generator().manual_seed(tile), torch.zeros(6).int(), torch.zeros(7).int()
    function = cute.compile(block_offsets, from_dlpack(firsts), from_dlpack(offsets), cutlass.Int32(0), tile)
    for _ in range(300):
        lengths = torch.randint(0, 3 * tile, (6,), generator=generator)
        lengths[lengths % 4 == 0] = 0
        offsets[1:] = lengths.cumsum(0)
        tokens = int(offsets[-1]) + int(lengths[0]) % 3
        function(from_dlpack(firsts.fill_(-1)), from_dlpack(offsets), tokens)
        taken = [f + n for f, length in zip(firsts.tolist(), lengths.tolist()) for n in range(-(-length // tile))]
        assert len(set(taken)) == len(taken)
        assert all(0 <= n < workspace_blocks(6, int(lengths.max()), tokens, tile, packed=True) for n in taken)
