"""The prefix cache: what is found, what is shared, what is copied. Blocks of 4 tokens."""

import pytest

from headrace.core.block_hash import chain_hash, chain_root
from headrace.core.block_table import BlockTable
from headrace.core.kv_cache import KVCache, PrefixHit
from tests.core.factories import make_kv

TOKENS = list(range(100, 112))  # three full blocks


def compute(kv: KVCache, tokens: list[int], *, salt: str = "", table: BlockTable | None = None) -> BlockTable:
    """A table whose tokens were all computed in one step of their own."""
    table = BlockTable() if table is None else table
    kv.begin_step()
    hit = kv.match(table, salt, tokens)
    kv.take(table, hit)
    kv.reserve(table, hit.num_tokens, len(tokens))
    kv.publish(table, salt, tokens, len(tokens))
    kv.copied(kv.end_step())
    return table


def match(kv: KVCache, tokens: list[int], salt: str = "") -> PrefixHit:
    kv.begin_step()
    return kv.match(BlockTable(), salt, tokens)


def test_block_hashes_are_the_same_in_every_process() -> None:
    """They name blocks across restarts and tiers, so Python's salted hash() would not do."""
    root = chain_root("tenant")
    assert root.hex() == "06d05f6fa9627a578db0134678352ad0"
    assert chain_hash(root, [1, 2, 3, 4]).hex() == "1730b4ae31b4db1b948259f5d22844f3"


def test_a_block_hash_depends_on_everything_before_it() -> None:
    names = {
        chain_hash(chain_hash(chain_root(salt), first), second)
        for salt in ("", "a", "b")
        for first in ([1, 2], [2, 1])
        for second in ([3, 4], [4, 3])
    }
    assert len(names) == 12


def test_nothing_is_found_in_an_empty_cache() -> None:
    assert match(make_kv(), TOKENS) == PrefixHit((), 0, 0)


def test_the_longest_common_prefix_of_whole_blocks_is_found() -> None:
    kv = make_kv()
    table = compute(kv, TOKENS)
    found = match(kv, [*TOKENS[:10], 7, 7, 7])
    assert found == PrefixHit(tuple(table.blocks[:2]), 8, 0)


def test_a_block_in_the_middle_is_not_found_without_those_before_it() -> None:
    kv = make_kv()
    compute(kv, TOKENS)
    assert match(kv, [7, *TOKENS[1:]]).num_tokens == 0


def test_a_block_is_not_found_behind_another_beginning() -> None:
    """Its tokens are the same, but what they attended to is not."""
    kv = make_kv()
    compute(kv, TOKENS[:8])
    compute(kv, [1, 2, 3, 4])
    assert match(kv, [1, 2, 3, 4, *TOKENS[4:9]]).num_tokens == 4


def test_a_part_of_a_block_is_not_shared() -> None:
    kv = make_kv()
    compute(kv, TOKENS[:6])
    assert match(kv, TOKENS).num_tokens == 4


def test_salts_never_share() -> None:
    kv = make_kv()
    compute(kv, TOKENS, salt="one")
    assert match(kv, TOKENS, salt="two").num_tokens == 0
    assert match(kv, TOKENS, salt="").num_tokens == 0
    assert match(kv, [*TOKENS, 7], salt="one").num_tokens == 12


def test_blocks_outlive_their_request_until_they_are_needed() -> None:
    kv = make_kv(num_blocks=5)
    kv.free(compute(kv, TOKENS))
    assert (kv.num_used, kv.num_cached, kv.num_available) == (0, 3, 4)
    found = match(kv, [*TOKENS, 7])
    assert (found.num_tokens, found.cost) == (12, 3)
    compute(kv, [7] * 16)
    assert match(kv, [*TOKENS, 7]).num_tokens == 0


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    kv = make_kv(num_blocks=5)
    kv.free(compute(kv, TOKENS))
    compute(kv, [7] * 8)
    assert match(kv, [*TOKENS, 7]).num_tokens == 8


def test_a_whole_hit_still_computes_its_last_token_in_its_own_copy() -> None:
    """The other holder of the last block must not be written over."""
    kv = make_kv()
    holder = compute(kv, TOKENS)
    kv.begin_step()
    table = BlockTable()
    found = kv.match(table, "", TOKENS)
    assert (found.num_tokens, found.cost) == (11, 1)
    kv.take(table, found)
    assert kv.fit(table, 11, 12) == 12
    kv.reserve(table, 11, 12)
    assert table.blocks[:2] == holder.blocks[:2]
    assert table.blocks[2] != holder.blocks[2]
    copies = kv.end_step()
    assert copies == ((holder.blocks[2], table.blocks[2]),)
    kv.check_integrity([holder, table], copies)
    kv.copied(copies)
    kv.check_integrity([holder, table])


def test_a_whole_hit_that_nobody_shares_is_written_in_place() -> None:
    kv = make_kv()
    kv.free(compute(kv, TOKENS))
    table = compute(kv, TOKENS)
    assert kv.num_used == 3
    kv.check_integrity([table])


def test_the_source_of_a_copy_is_kept_until_the_copy_ran() -> None:
    kv = make_kv(num_blocks=8)
    holder = compute(kv, TOKENS)
    kv.begin_step()
    table = BlockTable()
    kv.take(table, kv.match(table, "", TOKENS))
    kv.reserve(table, 11, 12)
    copies = kv.end_step()
    kv.free(holder)
    assert kv.num_used == 4
    kv.copied(copies)
    assert kv.num_used == 3


def test_a_block_that_the_same_step_fills_is_shared_but_not_copied() -> None:
    """A copy runs before its step, when the block is not filled yet."""
    kv = make_kv()
    first, second, third = BlockTable(), BlockTable(), BlockTable()
    kv.begin_step()
    kv.reserve(first, 0, 12)
    kv.publish(first, "", TOKENS, 12)
    assert kv.match(second, "", [*TOKENS, 7]) == PrefixHit(tuple(first.blocks), 12, 0)
    assert kv.match(third, "", TOKENS) == PrefixHit(tuple(first.blocks[:2]), 8, 0)
    kv.end_step()
    kv.begin_step()
    assert kv.match(third, "", TOKENS) == PrefixHit(tuple(first.blocks), 11, 1)


@pytest.mark.parametrize("parent_first", [True, False], ids=["parent writes first", "child writes first"])
def test_after_a_fork_the_first_to_write_gets_a_copy(parent_first: bool) -> None:
    kv = make_kv()
    parent = compute(kv, TOKENS[:10])
    child = kv.fork(parent)
    assert parent.room == child.room == 0, "both must ask before they write"
    assert kv.num_used == 3
    writer, other = (parent, child) if parent_first else (child, parent)
    shared = list(other.blocks)
    kv.begin_step()
    assert kv.fit(writer, 10, 11) == 11
    kv.reserve(writer, 10, 11)
    copies = kv.end_step()
    assert copies == ((shared[2], writer.blocks[2]),)
    assert writer.blocks[:2] == other.blocks[:2] == shared[:2]
    assert other.blocks == shared
    kv.copied(copies)
    kv.begin_step()
    kv.reserve(other, 10, 11)
    assert kv.end_step() == (), "the last holder writes in place"
    kv.check_integrity([parent, child])
    kv.free(parent)
    kv.free(child)
    assert kv.num_used == 0


def test_fit_says_how_far_the_blocks_reach() -> None:
    kv = make_kv(num_blocks=4)
    table = BlockTable()
    assert kv.fit(table, 0, 12) == 12
    assert kv.fit(table, 0, 13) == 12
    kv.reserve(table, 0, 6)
    assert kv.fit(table, 6, 100) == 12
    other = BlockTable()
    assert kv.fit(other, 0, 100) == 4
    kv.reserve(other, 0, 4)
    assert kv.fit(table, 8, 100) == 8
    assert kv.fit(table, 7, 100) == 8, "the last held block has a place left"


def test_fit_counts_the_copies_that_writing_would_need() -> None:
    kv = make_kv(num_blocks=4)
    parent = compute(kv, TOKENS[:10])
    kv.fork(parent)
    assert kv.fit(parent, 10, 11) == 10, "there is no block for the copy"


def test_retracted_blocks_are_found_no_more() -> None:
    kv = make_kv()
    table = compute(kv, TOKENS)
    kv.retract(table)
    assert match(kv, [*TOKENS, 7]).num_tokens == 0
    kv.check_integrity([table])
    kv.free(table)
    assert kv.num_cached == 0


def test_known_but_uncomputed_and_computed_but_unknown_tokens_are_not_published() -> None:
    kv = make_kv()
    table = BlockTable()
    kv.begin_step()
    kv.reserve(table, 0, 12)
    kv.publish(table, "", TOKENS, 7)
    assert table.published == 1
    kv.publish(table, "", TOKENS[:11], 12)
    assert table.published == 2
    kv.publish(table, "", TOKENS, 12)
    assert table.published == 3


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    kv = make_kv(prefix_cache=False)
    table = compute(kv, TOKENS)
    assert match(kv, TOKENS) == PrefixHit((), 0, 0)
    kv.free(table)
    assert (kv.num_used, kv.num_cached) == (0, 0)
