"""The block pool: who may have which block, and which cached block goes first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.block_pool import BlockPool


def name(content: int) -> bytes:
    return content.to_bytes(16, "little")


def cached(pool: BlockPool, *contents: int) -> list[int]:
    """Blocks with these contents, released in this order."""
    blocks = []
    for content in contents:
        block = pool.allocate()
        pool.publish(block, name(content))
        blocks.append(block)
    for block in blocks:
        pool.release(block)
    return blocks


def test_every_block_but_the_padding_block_is_handed_out_once() -> None:
    pool = BlockPool(8)
    assert pool.num_available == 7
    assert sorted(pool.allocate() for _ in range(7)) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.num_available == 0
    assert pool.num_used == 7
    with pytest.raises(AssertionError, match="exhausted"):
        pool.allocate()
    pool.check_integrity(dict.fromkeys(range(1, 8), 1))


def test_a_shared_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert pool.num_used == 1
    pool.release(block)
    assert pool.num_used == 0
    with pytest.raises(AssertionError, match="more often"):
        pool.release(block)


def test_a_released_block_with_a_hash_stays_findable() -> None:
    pool = BlockPool(3)
    (block,) = cached(pool, 1)
    assert pool.find(name(1)) == block
    assert (pool.num_cached, pool.num_available) == (1, 2)
    pool.share(block)
    assert (pool.num_cached, pool.num_available) == (0, 1)
    pool.check_integrity({block: 1})


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    (block,) = cached(pool, 1)
    assert block not in [pool.allocate(), pool.allocate()]
    assert pool.find(name(1)) == block


def test_the_least_recently_used_cached_block_is_evicted() -> None:
    pool = BlockPool(4)
    first, second, third = cached(pool, 1, 2, 3)
    pool.share(first)
    pool.release(first)
    assert [pool.allocate(), pool.allocate(), pool.allocate()] == [second, third, first]
    assert [pool.find(name(content)) for content in (1, 2, 3)] == [None, None, None]
    pool.check_integrity({first: 1, second: 1, third: 1})


def test_of_two_blocks_with_one_content_the_first_is_found() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(), pool.allocate()
    assert pool.publish(first, name(1))
    assert not pool.publish(second, name(1))
    pool.release(second)
    assert pool.num_cached == 0, "the second one holds nothing that the first does not"
    assert pool.find(name(1)) == first
    pool.check_integrity({first: 1})


def test_a_retracted_block_is_free_after_release() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.publish(block, name(1))
    pool.retract(block)
    pool.release(block)
    assert pool.find(name(1)) is None
    assert pool.num_cached == 0
    pool.check_integrity({})


def test_check_integrity_notices_a_lost_reference() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    with pytest.raises(AssertionError, match=f"block {block}"):
        pool.check_integrity({})


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["allocate", "share", "release", "publish", "find"]), st.integers(0, 9))
    )
)
def test_any_history_leaves_the_pool_consistent(history: list[tuple[str, int]]) -> None:
    """Against a model: references as a multiset, contents as a dict that eviction may only shrink."""
    pool = BlockPool(6)
    held: list[int] = []
    contents: dict[int, int] = {}  # block -> content
    for act, number in history:
        if act == "allocate" and pool.num_available:
            block = pool.allocate()
            assert block not in held
            contents.pop(block, None)
            held.append(block)
        elif act == "find":
            found = pool.find(name(number))
            assert found is None or contents[found] == number
            if found is not None:
                pool.share(found)
                held.append(found)
        elif held:
            block = held[number % len(held)]
            if act == "share":
                pool.share(block)
                held.append(block)
            elif act == "release":
                held.remove(block)
                pool.release(block)
            elif act == "publish" and block not in contents and pool.publish(block, name(number)):
                contents[block] = number
        pool.check_integrity({block: held.count(block) for block in held})
