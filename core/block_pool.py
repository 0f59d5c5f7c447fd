"""The blocks of one KV pool: which are free, who refers to them, and which can be found by content hash.

Owns reference counts, the LRU order of cached blocks and the hash index. Knows no request, no token and no
tensor. Called by core/kv_cache.py. Block 0 is the padding block: never handed out.
"""

from collections import OrderedDict
from collections.abc import Mapping


class BlockPool:
    """`num_blocks` blocks, numbers 1..num_blocks - 1 to hand out.

    A block is in one of three places: referenced (count > 0), free (no count, no hash), or cached (no count,
    but a hash by which it may come back). Cached blocks are given away last, longest unused first.
    """

    __slots__ = ("_blocks", "_cached", "_free", "_hashes", "_refs", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"a pool of {num_blocks} blocks has none to hand out"
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack, lowest number on top
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that someone refers to."""
        return self.num_blocks - 1 - self.num_available

    def refs(self, block: int) -> int:
        return self._refs[block]

    def hash_of(self, block: int) -> bytes | None:
        return self._hashes[block]

    def find(self, content: bytes) -> int | None:
        """The block with this content hash; it may be referenced or cached."""
        return self._blocks.get(content)

    def allocate(self) -> int:
        """A block with one reference and no hash; evicts the least recently used cached block if it must."""
        if self._free:
            block = self._free.pop()
        else:
            assert self._cached, "allocate from an exhausted pool: ask num_available first"
            block, _ = self._cached.popitem(last=False)
            self._unindex(block)
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a referenced or cached block."""
        if not self._refs[block]:
            del self._cached[block]
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """One reference less. The last one leaves the block cached if it has a hash, else free."""
        count = self._refs[block] - 1
        assert count >= 0, f"block {block} released more often than shared"
        self._refs[block] = count
        if count:
            return
        if self._hashes[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def publish(self, block: int, content: bytes) -> bool:
        """Make a referenced block findable. False if another block with this content already is."""
        assert self._refs[block], f"block {block} published without a reference"
        if content in self._blocks:
            return False
        assert self._hashes[block] is None, f"block {block} published with two contents"
        self._blocks[content] = block
        self._hashes[block] = content
        return True

    def retract(self, block: int) -> None:
        """Make a referenced block unfindable: what it holds cannot be trusted."""
        assert self._refs[block], f"block {block} retracted without a reference"
        self._unindex(block)

    def check_integrity(self, expected: Mapping[int, int] | None = None) -> None:
        """Assert that every block is in exactly one place, and has the `expected` references if given."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, f"blocks {free & cached} are both free and cached"
        assert 0 not in free | cached, "the padding block can be handed out"
        assert self._refs[0] == 0, "the padding block is referenced"
        for block in range(1, self.num_blocks):
            count = self._refs[block]
            assert (count == 0) == (block in free or block in cached), f"block {block}: {count} references"
            if expected is not None:
                wanted = expected.get(block, 0)
                assert count == wanted, f"block {block}: {count} references counted, {wanted} exist"
        assert all(self._hashes[block] is None for block in free), "a free block has a hash"
        assert all(self._hashes[block] is not None for block in cached), "a cached block has no hash"
        index = {content: block for block, content in enumerate(self._hashes) if content is not None}
        assert index == self._blocks, "the hash index and the blocks' hashes differ"

    def _unindex(self, block: int) -> None:
        content = self._hashes[block]
        if content is not None:
            del self._blocks[content]
            self._hashes[block] = None
