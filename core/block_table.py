"""The KV blocks of one request, in position order, and how far they are hashed and published.

A record without behaviour: core/kv_cache.py owns its contents, a request carries it, plan rows show its list.
"""


class BlockTable:
    """Written by KVCache only."""

    __slots__ = ("blocks", "hashes", "publish_at", "published", "room")

    def __init__(self) -> None:
        self.blocks: list[int] = []  # grows in place; replaced, never emptied, when the blocks are given up
        self.hashes: list[bytes] = []  # chained hashes of the leading full blocks; outlive the blocks
        self.published = 0  # leading blocks that were offered to the prefix index
        self.publish_at = 0  # tokens known when a decode can publish its next block
        self.room = 0  # positions below this may be written without asking
