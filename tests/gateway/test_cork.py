"""The cork: everything of one turn of the loop is flushed once, at its end."""

import asyncio

from headrace.gateway.cork import Cork


class Bottle:
    def __init__(self) -> None:
        self.flushed = 0

    def flush(self) -> None:
        self.flushed += 1


async def test_what_is_added_in_one_turn_is_flushed_after_it() -> None:
    cork, first, second = Cork(), Bottle(), Bottle()
    cork.add(first)
    cork.add(second)
    assert (first.flushed, second.flushed) == (0, 0)
    await asyncio.sleep(0)
    assert (first.flushed, second.flushed) == (1, 1)
    await asyncio.sleep(0)
    assert (first.flushed, second.flushed) == (1, 1)


async def test_the_next_turn_flushes_again() -> None:
    cork, bottle = Cork(), Bottle()
    for turn in range(1, 4):
        cork.add(bottle)
        await asyncio.sleep(0)
        assert bottle.flushed == turn
