"""When to speculate at all: a step that may verify drafts waits for the one before it, and asks for new drafts.

Owns how long to leave it alone after it did not pay. Pure counting; core/speculator.py's.
"""

PATIENCE = (
    3  # steps in a row that may choose no drafts before speculation rests; the first has none to choose from
)
SHORTEST_REST = 8  # steps
LONGEST_REST = 256


class Pace:
    """Rests after failures, for twice as long each time; wakes early when the batch has shrunk by a quarter."""

    def __init__(self) -> None:
        self._failures = 0  # steps in a row
        self._left = 0  # steps of the present rest
        self._rest = SHORTEST_REST  # the next one
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

    def keep_on(self, *, pays: bool, running: int) -> bool:
        """Whether the step shall speculate, or be a plain one and those after it too.

        Args:
            pays: drafts were chosen for it.
            running: requests that yield tokens.
        """
        if pays:
            self._failures, self._rest = 0, SHORTEST_REST
            return True
        if not running:
            return True
        self._failures += 1
        if self._failures < PATIENCE:
            return True
        self._failures = 0
        self._left, self._tired_at = self._rest, running
        self._rest = min(2 * self._rest, LONGEST_REST)
        return False
