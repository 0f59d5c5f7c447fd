"""Two clocks of one connection: when to speak next, and since when the other side is silent.

Knows no socket and no message. Both ends hold one per peer; `now` is in seconds of a monotonic clock.
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
