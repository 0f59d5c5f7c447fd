"""Blocks for requests: finding cached prefixes, making room for positions, copy-on-write, giving back.

Owns the contents of every BlockTable and the pool below it. Knows no request and no queue: it says whether
something fits, core/scheduler.py decides who yields.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace.core.block_hash import chain_hash, chain_root
from headrace.core.block_pool import BlockPool
from headrace.core.block_table import BlockTable


class PrefixHit(NamedTuple):
    """What the prefix index holds of a request; nothing is taken until `KVCache.take`."""

    blocks: tuple[int, ...]
    num_tokens: int  # positions that need not be computed
    cost: int  # available blocks that taking it uses up, the copy of a shared last block included


NO_HIT = PrefixHit((), 0, 0)


class KVCache:
    """The paged KV of one engine, as numbers.

    Steps run on the device in the order in which they are scheduled. So a block given up while a step that
    reads it is in flight may go to the next step, and a block is findable as soon as the step that fills it is
    scheduled. Only a copy, which runs before its step, must not read what that same step writes.
    """

    __slots__ = ("_copies", "_fresh", "_pool", "_prefix_cache", "block_size")

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._prefix_cache = prefix_cache
        self._fresh: set[int] = set()  # blocks that the step being scheduled fills
        self._copies: list[tuple[int, int]] = []  # of the step being scheduled; sources keep a reference

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be had without taking any from a request."""
        return self._pool.num_available

    @property
    def num_used(self) -> int:
        """Blocks that requests refer to."""
        return self._pool.num_used

    @property
    def num_cached(self) -> int:
        """Blocks that no request refers to, kept for their content."""
        return self._pool.num_cached

    @property
    def capacity(self) -> int:
        """Positions that one request could have if it were alone."""
        return (self._pool.num_blocks - 1) * self.block_size

    def blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def begin_step(self) -> None:
        """A new step is being scheduled: what earlier ones fill may be copied from now on."""
        self._fresh.clear()

    def end_step(self) -> tuple[tuple[int, int], ...]:
        """The (source, target) copies of the scheduled step. Its commit hands them to `copied`."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def copied(self, copies: Iterable[tuple[int, int]]) -> None:
        """The step with these copies ran: their sources are needed no more."""
        for source, _ in copies:
            self._pool.release(source)

    def match(self, table: BlockTable, salt: str, token_ids: Sequence[int]) -> PrefixHit:
        """The longest cached prefix of `token_ids`, short of the last token: that must be computed to go on.

        Hashes the tokens on first use, O(tokens); later calls cost one look-up per block found.
        """
        if not self._prefix_cache:
            return NO_HIT
        pool = self._pool
        self._extend_hashes(table, token_ids, len(token_ids) // self.block_size, salt)
        blocks: list[int] = []
        for content in table.hashes:
            block = pool.find(content)
            if block is None:
                break
            blocks.append(block)
        num_tokens = len(blocks) * self.block_size
        copy = 0
        if blocks and num_tokens == len(token_ids):
            last = blocks[-1]
            if last in self._fresh:
                blocks.pop()
                num_tokens -= self.block_size
            else:
                num_tokens -= 1
                copy = 1 if pool.refs(last) else 0
        cost = copy + sum(1 for block in blocks if not pool.refs(block))
        return PrefixHit(tuple(blocks), num_tokens, cost)

    def take(self, table: BlockTable, hit: PrefixHit) -> None:
        """Refer to the blocks of a hit, found since the last allocation. Writing there takes a `reserve`."""
        assert not table.blocks, "take into a table that holds blocks"
        for block in hit.blocks:
            self._pool.share(block)
        table.blocks = list(hit.blocks)
        self._mark_published(table, len(hit.blocks))

    def fit(self, table: BlockTable, start: int, end: int) -> int:
        """The largest position up to `end` to which `reserve` can go now; `start` if nothing fits."""
        spare = self._pool.num_available - len(self._shared(table, start, end))
        return max(start, min(end, (len(table.blocks) + spare) * self.block_size)) if spare >= 0 else start

    def reserve(self, table: BlockTable, start: int, end: int) -> None:
        """Make positions start..end - 1 writable: new blocks, and private copies of shared ones.

        `fit` must have said that it fits.
        """
        pool, blocks = self._pool, table.blocks
        for index in self._shared(table, start, end):
            source = blocks[index]
            assert source not in self._fresh, f"block {source} would be copied before it is filled"
            blocks[index] = pool.allocate()
            self._copies.append((source, blocks[index]))
        for _ in range(self.blocks_for(end) - len(blocks)):
            blocks.append(pool.allocate())
        table.room = len(blocks) * self.block_size

    def publish(self, table: BlockTable, salt: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Make the full blocks findable whose tokens are known and whose KV was dispatched."""
        full = min(num_computed, len(token_ids)) // self.block_size
        if not self._prefix_cache or full <= table.published:
            return
        self._extend_hashes(table, token_ids, full, salt)
        for index in range(table.published, full):
            block = table.blocks[index]
            if self._pool.publish(block, table.hashes[index]):
                self._fresh.add(block)
        self._mark_published(table, full)

    def free(self, table: BlockTable) -> None:
        """Give the blocks back. Last ones are reused first: a prefix is worth more than what follows."""
        for block in reversed(table.blocks):
            self._pool.release(block)
        table.blocks = []
        table.room = 0
        self._mark_published(table, 0)

    def retract(self, table: BlockTable) -> None:
        """Make the request's blocks unfindable: their KV went wrong."""
        for block in table.blocks:
            self._pool.retract(block)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks; whichever writes first into a shared one gets its own copy.

        That copy replaces an entry of the writer's table, so a device copy of that table is stale.
        """
        child = BlockTable()
        child.blocks = list(table.blocks)
        child.hashes = list(table.hashes)
        self._mark_published(child, table.published)
        for block in table.blocks:
            self._pool.share(block)
        table.room = child.room = 0
        return child

    def check_integrity(self, tables: Iterable[BlockTable], copies: Iterable[tuple[int, int]] = ()) -> None:
        """Assert that these tables and uncommitted copies account for every reference, and the hashes."""
        assert not self._copies, "a step ended without taking its copies"
        expected = Counter(source for source, _ in copies)
        for table in tables:
            expected.update(table.blocks)
            assert len(set(table.blocks)) == len(table.blocks), "a table holds a block twice"
            assert table.room <= len(table.blocks) * self.block_size, "a table has room beyond its blocks"
            assert table.published <= len(table.blocks), "a table published blocks that it does not hold"
            for block, content in zip(table.blocks[: table.published], table.hashes, strict=False):
                assert self._pool.hash_of(block) in (content, None), f"block {block} is published as another"
        self._pool.check_integrity(expected)

    def _shared(self, table: BlockTable, start: int, end: int) -> list[int]:
        """Indices of held blocks in the range that someone else refers to as well."""
        size, blocks = self.block_size, table.blocks
        indices = range(start // size, min(self.blocks_for(end), len(blocks)))
        return [index for index in indices if self._pool.refs(blocks[index]) > 1]

    def _extend_hashes(self, table: BlockTable, token_ids: Sequence[int], full: int, salt: str) -> None:
        size, hashes = self.block_size, table.hashes
        for index in range(len(hashes), full):
            parent = hashes[-1] if hashes else chain_root(salt)
            hashes.append(chain_hash(parent, token_ids[index * size : (index + 1) * size]))

    def _mark_published(self, table: BlockTable, published: int) -> None:
        table.published = published
        # The newest known token is not computed yet: a block's last one is when one more is known.
        table.publish_at = (published + 1) * self.block_size + 1 if self._prefix_cache else sys.maxsize
