"""The clocks of one connection: when to speak, when the other side is dead, when to try again.

Knows no socket and no message. `now` is in seconds of a monotonic clock.
"""


class Heartbeat:
    """Says when a beat is due and when the other side counts as gone.

    Args:
        interval_s: seconds between two beats of ours.
        dead_after_s: seconds without a word after which the other side is dead.
        now: the time of the handshake; the first beat is due at once.
    """

    __slots__ = ("_dead_after_s", "_heard_at", "_interval_s", "_next_at")

    def __init__(self, interval_s: float, dead_after_s: float, now: float) -> None:
        self._interval_s = interval_s
        self._dead_after_s = dead_after_s
        self._heard_at = now
        self._next_at = now

    def due(self, now: float) -> bool:
        """Whether a beat should be sent now."""
        return now >= self._next_at

    def sent(self, now: float) -> None:
        """A beat left; missed ones are not made up for."""
        self._next_at = now + self._interval_s

    def heard(self, now: float) -> None:
        """Any frame of the other side came in."""
        self._heard_at = now

    def silence_s(self, now: float) -> float:
        """Seconds since the other side was last heard."""
        return now - self._heard_at

    def is_dead(self, now: float) -> bool:
        """Whether the other side has been silent for too long."""
        return now - self._heard_at > self._dead_after_s


class Backoff:
    """Seconds to wait before the next attempt: doubled after each that did not last, between two bounds.

    Args:
        low_s: the first wait.
        high_s: the longest.
        steady_s: a connection that lasted so long makes the next wait the first again.
    """

    __slots__ = ("_high_s", "_low_s", "_next_s", "_steady_s")

    def __init__(self, low_s: float, high_s: float, steady_s: float) -> None:
        self._low_s = low_s
        self._high_s = high_s
        self._steady_s = steady_s
        self._next_s = low_s

    def after(self, lasted_s: float) -> float:
        """The wait after an attempt that lasted so long."""
        if lasted_s > self._steady_s:
            self._next_s = self._low_s
        wait, self._next_s = self._next_s, min(2 * self._next_s, self._high_s)
        return wait
