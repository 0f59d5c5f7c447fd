"""What a drafter offers for one request, and what it is asked: the surface between drafters and the speculator.

Plain numbers; no tensors. core/speculation's drafters implement HostDrafter, core/speculator.py calls them.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headrace.core.request import Request


class Proposal(NamedTuple):
    """Tokens that may come next in a request's output."""

    drafter: str
    tokens: Sequence[int]
    confidences: Sequence[
        float
    ]  # one per token, on the drafter's own scale; a calibration makes them probabilities
    sampled: bool = (
        False  # drawn from a distribution that the device keeps; False = certain, verified by equality
    )

    def cut(self, count: int) -> "Proposal":
        """The first `count` of them."""
        if count >= len(self.tokens):
            return self
        return Proposal(self.drafter, self.tokens[:count], self.confidences[:count], self.sampled)


class HostDrafter(Protocol):
    """Drafts from what the host knows: token ids."""

    @property
    def name(self) -> str:
        """Of its proposals; the calibration keeps drafters apart by it."""
        ...

    def propose(self, request: Request, limit: int) -> Proposal | None:
        """At most `limit` tokens to follow `request.token_ids`, all of which are known; None = no idea."""
        ...

    def forget(self, request: Request) -> None:
        """It ended: drop what was kept of it. Called for every request, known to this drafter or not."""
        ...
