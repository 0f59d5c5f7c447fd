"""Decides how many drafts of each row are worth verifying in one step. Pure arithmetic; called by the speculator.

Everything it looks at is known before the step's tokens are drawn, so the choice cannot bias them.
The idea is DSpark's confidence-scheduled verification (arXiv 2607.05147), here with the whole cost of a step.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul


def choose(
    offers: Sequence[Sequence[float]],
    base_tokens: int,
    cost: Callable[[int], float],
    limit: int,
    *,
    overhead_ms: float = 0.0,
) -> list[int]:
    """Drafts to verify in each row: the number that emits the most tokens per millisecond, the likeliest first.

    A row's j-th draft is emitted if it and all before it are accepted: its worth is the product of their
    probabilities. That falls along a row, so the B worthiest drafts of all rows are prefixes of the rows, and no
    other B drafts emit more. All B are compared, as a step's time may be a staircase; of equals the least wins.

    Args:
        offers: for each row that emits a token, the probability, 0..1, that its draft 1, 2, ... is accepted, given
            that those before it are; empty = no drafts.
        base_tokens: query tokens of the step without drafts, those of prefills included.
        cost: milliseconds of a step of so many query tokens; above 0, not falling.
        limit: the most drafts, all rows together.
        overhead_ms: what a step with drafts costs beyond its query tokens: drafting for it, and waiting for the
            device where a plain step would have been prepared meanwhile.
    """
    worths: list[float] = []
    owners: list[int] = []
    for row, offer in enumerate(offers):
        worths += accumulate(offer, mul)
        owners += [row] * len(offer)
    # A stable sort: of equal worths in one row the earlier draft stays ahead.
    order = sorted(range(len(worths)), key=worths.__getitem__, reverse=True)[: max(limit, 0)]
    emitted = float(len(offers))
    best, rate = 0, emitted / cost(base_tokens)
    for count, at in enumerate(order, 1):
        emitted += worths[at]
        reached = emitted / (cost(base_tokens + count) + overhead_ms)
        if reached > rate:
            best, rate = count, reached
    drafts = [0] * len(offers)
    for at in order[:best]:
        drafts[owners[at]] += 1
    return drafts
