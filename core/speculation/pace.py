"""When to speculate at all: a step that may verify drafts waits for the one before it, and asks for new drafts.

Owns what it has gained lately, and how long to leave it alone where it gained nothing. Pure counting;
core/speculator.py's.
"""

SHORTEST_REST = 16  # steps
LONGEST_REST = 1024
_RATE = 0.2  # share of the running gain that one step is worth
_BENEFIT_OF_DOUBT = 1.15  # the running gain at a new start
_SUCCESS = 1.1  # running gain after so many steps that makes the next rest short again
_STEPS = 8


class Pace:
    """Rests where speculation was slower than plain steps would have been, for twice as long each time.

    It wakes early when the batch has shrunk by a quarter.
    """

    def __init__(self) -> None:
        self._gain = _BENEFIT_OF_DOUBT
        self._steps = 0  # since the newest start
        self._left = 0  # steps of the present rest
        self._length = SHORTEST_REST  # of the next one
        self._tired_at = 0  # requests running when the present rest began

    def awake(self, running: int) -> bool:
        """Asked once for each step."""
        if self._left and running * 4 > self._tired_at * 3:
            self._left -= 1
            return False
        self._left = 0
        return True

    def wake(self) -> None:
        """There is something to verify."""
        self._left = 0

    def rest(self, running: int) -> None:
        """Nothing can be gained with so many requests running."""
        self._left, self._tired_at = self._length, running
        self._length = min(2 * self._length, LONGEST_REST)
        self._gain, self._steps = _BENEFIT_OF_DOUBT, 0

    def record(self, gain: float, running: int) -> None:
        """A step emitted `gain` times what plain steps would have in its time."""
        self._steps += 1
        self._gain += _RATE * (gain - self._gain)
        if self._gain < 1:
            self.rest(running)
        elif self._steps >= _STEPS and self._gain > _SUCCESS:
            self._length = SHORTEST_REST
