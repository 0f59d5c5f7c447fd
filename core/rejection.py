"""Why a generation is not taken: one exception per cause, each with the code that goes over the wire.

Raised by core/scheduler.py on submission; the engine server turns one into a `Rejected` message.
"""


class Rejection(Exception):
    """Nothing was queued. The message names the value and the limit."""

    code = "bad_request"


class BadRequest(Rejection):
    """What was asked cannot be done by any engine."""


class TooLong(Rejection):
    """Prompt and output so far leave no room in the context."""

    code = "too_long"


class QueueFull(Rejection):
    """As many requests wait, or are parked, as this engine holds."""

    code = "queue_full"
