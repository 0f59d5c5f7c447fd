"""Many equal waits on one timer."""

import asyncio

from headrace.gateway.deadlines import Deadlines


class Waiter:
    """Notes that its time was over; waits `again` so often."""

    def __init__(self, deadlines: Deadlines, again: int = 0) -> None:
        self.times: list[float] = []
        self.called = asyncio.Event()
        self._deadlines = deadlines
        self._again = again

    def overdue(self) -> None:
        self.times.append(asyncio.get_running_loop().time())
        if len(self.times) <= self._again:
            self._deadlines.add(self)
        else:
            self.called.set()


async def test_everybody_is_called_once_in_order_and_not_early() -> None:
    deadlines = Deadlines(0.02)
    begin = asyncio.get_running_loop().time()
    waiters = [Waiter(deadlines) for _ in range(3)]
    for waiter in waiters:
        deadlines.add(waiter)
        await asyncio.sleep(0.005)
    await asyncio.wait_for(waiters[-1].called.wait(), 10)
    times = [time for waiter in waiters for time in waiter.times]
    assert len(times) == 3
    assert times == sorted(times)
    assert times[0] >= begin + 0.019


async def test_who_left_is_not_called_and_the_next_is() -> None:
    deadlines = Deadlines(0.01)
    gone, stays = Waiter(deadlines), Waiter(deadlines)
    deadlines.add(gone)
    deadlines.add(stays)
    deadlines.discard(gone)
    deadlines.discard(gone)
    await asyncio.wait_for(stays.called.wait(), 10)
    assert not gone.times


async def test_it_serves_again_after_all_have_left() -> None:
    deadlines = Deadlines(0.01)
    first, second = Waiter(deadlines), Waiter(deadlines, again=2)
    deadlines.add(first)
    await asyncio.wait_for(first.called.wait(), 10)
    deadlines.add(second)
    await asyncio.wait_for(second.called.wait(), 10)
    assert len(second.times) == 3


async def test_one_that_raises_does_not_stop_the_others() -> None:
    class Broken(Waiter):
        def overdue(self) -> None:
            raise ValueError("a bug")

    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))
    deadlines = Deadlines(0.01)
    deadlines.add(Broken(deadlines))
    waiter = Waiter(deadlines)
    deadlines.add(waiter)
    await asyncio.wait_for(waiter.called.wait(), 10)
    assert len(reported) == 1
