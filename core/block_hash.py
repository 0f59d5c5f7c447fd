"""Names for the content of full KV blocks: a hash chain over token ids, one chain per salt.

A block's name covers every token before it, so equal names mean equal KV. Knows nothing of blocks. Called by
core/kv_cache.py.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

# 128 bits: with 2**32 blocks the chance of one collision is 2**-65, and to forge one takes 2**64 tries.
_DIGEST_SIZE = 16


def chain_root(salt: str) -> bytes:
    """The parent of a chain's first block. Different salts give chains that never meet."""
    return blake2b(
        salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_SIZE, person=b"headrace-salt"
    ).digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a block that holds `token_ids` (int32 each) after the blocks that `parent` names."""
    tokens = array("i", token_ids).tobytes()
    return blake2b(parent + tokens, digest_size=_DIGEST_SIZE, person=b"headrace-block").digest()
