"""How far it is worth to look ahead, before anything is drafted: by how often drafts of each place stood lately.

Pure arithmetic; core/speculator.py's. Without it, a batch that drafts cannot speed up would pay for each attempt.
"""

from headrace.core.speculation.step_costs import StepCosts

PRIOR = 0.8  # of a draft whose predecessors stand, before any was seen
_RATE = 0.02  # share of an error that one verification moves
_FORGET = 0.1  # share of the way back to the prior, for each rest that was slept through
_HOPE = 0.05  # added: what is not tried cannot prove itself


class Outlook:
    """The model's own drafter, up to `depth` tokens ahead."""

    def __init__(self, depth: int) -> None:
        self._stands = [PRIOR] * depth  # by place, given that those before it stand

    def record(self, place: int, stood: bool) -> None:
        """A draft was verified, and those before it stood; place 0 is the first."""
        if place < len(self._stands):
            self._stands[place] += _RATE * (stood - self._stands[place])

    def forget(self) -> None:
        """Nothing was tried for a while."""
        self._stands = [value + _FORGET * (PRIOR - value) for value in self._stands]

    def depth(self, rows: int, costs: StepCosts) -> int:
        """Tokens to look ahead for each of `rows`, so that most are emitted per millisecond; 0 = none.

        A pass of the drafter over the step costs about as much as each of its guesses.
        """
        best, most = 0, rows / costs.plain_ms(rows)
        emitted, reached = float(rows), float(rows)
        for depth, stands in enumerate(self._stands, 1):
            if rows * (1 + depth) > costs.most_tokens:
                break
            reached *= min(stands + _HOPE, 1.0)
            emitted += reached
            drafting = costs.draft_ms(rows)
            if not costs.whole_depth:
                drafting *= (1 + depth) / (1 + len(self._stands))
            rate = emitted / (costs.verify_ms(rows * (1 + depth)) + drafting)
            if rate > most:
                best, most = depth, rate
        return len(self._stands) if best and costs.whole_depth else best
