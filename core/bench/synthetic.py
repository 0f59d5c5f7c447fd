"""A drafter that is right with a set probability, whatever the model says: what speculation gains at an acceptance.

Random weights have no drafter, and their next tokens hang on the last bit of a sum. So the drafts are random ids,
and a coin, not the model, says whether one stands; all work is done as ever. `--speculate synthetic:0.7`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from zlib import crc32

import torch
from torch import Tensor

from headrace.core.request import Request
from headrace.core.sampler import Drafts, Sampled, Sampler
from headrace.core.speculation.proposal import Proposal
from headrace.kernels.random_uniform import FRACTION_BITS, Purpose, random_uniform
from headrace.kernels.verify import Verified, leading

NAME = "synthetic"
_ODD = 0x9E3779B1  # spreads ids and positions over the vocabulary


class Coins:
    """Decides about drafts once `fix` was called; until then the model does."""

    def __init__(self) -> None:
        # Made before any step is recorded, for recorded steps read it from the device's memory.
        self._bounds = {"cpu": torch.full((1,), -1)}
        if torch.cuda.is_available():
            self._bounds["cuda"] = torch.full((1,), -1, device="cuda")

    def fix(self, acceptance: float) -> None:
        """From now on each draft stands with this probability, given that those before it do."""
        for bound in self._bounds.values():
            bound.fill_(round(acceptance * (1 << FRACTION_BITS)))

    def decide(self, found: Verified, drafts: Drafts, slots: Tensor, positions: Tensor) -> Verified:
        """`found`, or what the coins say; safe in a CUDA graph."""
        bound = self._bounds[slots.device.type]
        # The draft is part of the seed, so that a slot's next request tosses other coins.
        coins = random_uniform(slots + drafts.tokens * _ODD, positions, Purpose.ACCEPT) < bound
        stands = coins & (drafts.tokens >= 0)
        decided = bound >= 0
        return Verified(
            torch.where(decided & stands, drafts.tokens, found.tokens),
            torch.where(decided, leading(stands, drafts.starts), found.accepted),
        )


@contextmanager
def tossing() -> Iterator[Coins]:
    """Engines that are built and run inside let the coins decide."""
    coins = Coins()
    check, verify = Sampler.check, Sampler.verify

    def tossed(self: Sampler, logits: Tensor, slots: Tensor, positions: Tensor, drafts: Drafts) -> Verified:
        return coins.decide(check(self, logits, slots, positions, drafts), drafts, slots, positions)

    def tossed_on_the_host(
        self: Sampler,
        logits: Tensor,
        slots: Tensor,
        slot_list: Sequence[int],
        positions: Tensor,
        drafts: Drafts,
    ) -> Sampled:
        found = verify(self, logits, slots, slot_list, positions, drafts)
        assert found.accepted is not None
        decided = coins.decide(Verified(found.tokens, found.accepted), drafts, slots, positions)
        return replace(found, tokens=decided.tokens, accepted=decided.accepted)

    Sampler.check, Sampler.verify = tossed, tossed_on_the_host  # type: ignore[method-assign]
    try:
        yield coins
    finally:
        Sampler.check, Sampler.verify = check, verify  # type: ignore[method-assign]


class SyntheticDrafter:
    """Random ids for every request. Implements HostDrafter.

    Args:
        acceptance: stated as the confidence of each.
        vocab_size: ids are below it.
    """

    name = NAME

    def __init__(self, acceptance: float, vocab_size: int) -> None:
        self._acceptance = acceptance
        self._vocab_size = vocab_size

    def propose(self, request: Request, limit: int) -> Proposal | None:
        """See HostDrafter."""
        known: Sequence[int] = request.token_ids
        first = crc32(f"{request.request_id} {len(known)} {known[-1]}".encode())
        tokens = [(first + _ODD * place) % self._vocab_size for place in range(limit)]
        return Proposal(NAME, tokens, [self._acceptance] * limit)

    def forget(self, request: Request) -> None:
        """See HostDrafter: nothing is kept."""
