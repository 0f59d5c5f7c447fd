"""Drafts what followed the newest tokens of a request when they stood in it before. Implements HostDrafter.

Owns an index per request. Called by core/speculator.py.
"""

from headrace.core.request import Request
from headrace.core.speculation.ngram import NgramIndex
from headrace.core.speculation.proposal import Proposal

NAME = "ngram"


class NgramDrafter:
    """Prompt look-up for every request that asks."""

    name = NAME

    def __init__(self) -> None:
        self._indices: dict[Request, NgramIndex] = {}

    def propose(self, request: Request, limit: int) -> Proposal | None:
        """See HostDrafter. The confidence is the length of the repeated phrase."""
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = NgramIndex()
        index.extend(request.token_ids[len(index) :])
        tokens = index.propose(limit)
        if not tokens:
            return None
        return Proposal(NAME, tokens, [float(index.match_length)] * len(tokens))

    def forget(self, request: Request) -> None:
        """See HostDrafter."""
        self._indices.pop(request, None)
