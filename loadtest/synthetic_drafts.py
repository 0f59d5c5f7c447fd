"""A drafter that is right with a set probability, to measure what speculation gains at a known acceptance.

It knows what each prompt's greedy answer is and spoils each token by a coin of its own. Imports no engine: the
caller says how a proposal is made. Used by `headrace bench engine --speculate synthetic:0.7`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

NAME = "synthetic"
P = TypeVar("P")
_ODD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1


class Drafted(Protocol):
    """What is read of a request."""

    @property
    def request_id(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and output so far."""
        ...

    @property
    def prompt_len(self) -> int: ...


class SyntheticDrafter(Generic[P]):
    """Each draft is the recorded token with probability `acceptance`, whatever the others are.

    The coins are a function of (seed, prompt, position), so a run can be repeated.

    Args:
        answers: prompt -> its recorded answer. A prompt that is not there gets no drafts.
        acceptance: probability that a draft is right.
        vocab_size: a wrong draft is the right token's neighbour in 0..vocab_size - 1.
        make: (drafter, tokens, confidences) -> a proposal.
        seed: of the coins.
    """

    name = NAME

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Sequence[int]],
        acceptance: float,
        vocab_size: int,
        make: Callable[[str, Sequence[int], Sequence[float]], P],
        *,
        seed: int = 0,
    ) -> None:
        if not 0 <= acceptance <= 1:
            raise ValueError(f"synthetic acceptance {acceptance}: must be in 0..1")
        self._acceptance = acceptance
        self._make = make
        self._drafts = {
            prompt: [
                token if _coin(seed, hash(prompt), at) < acceptance else (token + 1) % vocab_size
                for at, token in enumerate(answer)
            ]
            for prompt, answer in answers.items()
        }
        self._open: dict[str, list[int]] = {}  # by request id

    def propose(self, request: Drafted, limit: int) -> P | None:
        """At most `limit` tokens to follow `request.token_ids`; None = nothing is recorded there."""
        drafts = self._open.get(request.request_id)
        if drafts is None:
            drafts = self._drafts.get(tuple(request.token_ids[: request.prompt_len]), [])
            self._open[request.request_id] = drafts
        at = len(request.token_ids) - request.prompt_len
        found = drafts[at : at + limit]
        return self._make(self.name, found, [self._acceptance] * len(found)) if found else None

    def forget(self, request: Drafted) -> None:
        """It ended."""
        self._open.pop(request.request_id, None)


def _coin(seed: int, prompt: int, position: int) -> float:
    """In [0, 1); a tuple of numbers hashes alike in every process."""
    x = 0
    for part in (seed, prompt, position):
        x = (x + (part + 1) * _ODD[0]) & _MASK
        x = ((x ^ (x >> 30)) * _ODD[1]) & _MASK
        x = ((x ^ (x >> 27)) * _ODD[2]) & _MASK
        x ^= x >> 31
    return x / (1 << 64)
