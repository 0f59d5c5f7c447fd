"""Greedy generation of one sequence, plain or speculative with the MTP module; counts drafts and acceptances.

Written to be plainly right: it is what the engine's speculation is compared with, not a fast path.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from training.attention import LatentCache
from training.model import Model


@dataclass(slots=True)
class Generation:
    """One answer and how it came about."""

    ids: list[int]
    steps: int = 0  # forward passes of the trunk, the prompt's included
    drafted: list[int] = field(
        default_factory=list
    )  # by depth: verified after all shallower drafts were right
    accepted: list[int] = field(default_factory=list)


class Decoder:
    """Generates with one model; a sequence at a time."""

    def __init__(self, model: Model, stop_ids: Sequence[int]) -> None:
        """stop_ids: tokens that end a sequence; they are kept in its ids."""
        self._model = model
        self._stops = frozenset(stop_ids)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], limit: int, depth: int = 0) -> Generation:
        """At most `limit` tokens, the likeliest each time; depth: drafts per step, 0 for plain decoding."""
        model = self._model
        caches = [LatentCache() for _ in model.blocks]
        drafter = LatentCache()
        hidden = model.trunk(torch.tensor([prompt]), 0, caches)
        if depth and len(prompt) > 1:
            model.draft(hidden[:, :-1], torch.tensor([prompt[1:]]), 0, drafter)
        answer = Generation([_best(model.logits(hidden[:, -1]))], 1, [0] * depth, [0] * depth)
        # the state before each step: `last` is the hidden state of position `length - 1`, ids[-1] stands at `length`
        last, length = hidden[:, -1:], len(prompt)
        while len(answer.ids) < limit and answer.ids[-1] not in self._stops:
            drafts = self._draft(last, answer.ids[-1], length, depth, drafter)
            hidden = model.trunk(torch.tensor([[answer.ids[-1], *drafts]]), length, caches)
            answer.steps += 1
            chosen = model.logits(hidden[0]).argmax(-1).tolist()
            new = self._verify(chosen, drafts, answer)
            for cache in caches:
                cache.truncate(length + len(new))
            if depth:
                # entries below depth 1 came from guessed hidden states: redo them from the true ones
                drafter.truncate(length)
                if len(new) > 1:
                    model.draft(hidden[:, : len(new) - 1], torch.tensor([new[:-1]]), length, drafter)
            last, length = hidden[:, len(new) - 1 : len(new)], length + len(new)
            answer.ids += new
        answer.ids = answer.ids[:limit]
        return answer

    def _draft(self, hidden: Tensor, token: int, length: int, depth: int, cache: LatentCache) -> list[int]:
        drafts: list[int] = []
        for i in range(depth):
            hidden = self._model.draft(hidden, torch.tensor([[token]]), length - 1 + i, cache)
            token = _best(self._model.draft_logits(hidden[:, -1]))
            drafts.append(token)
        return drafts

    def _verify(self, chosen: list[int], drafts: list[int], answer: Generation) -> list[int]:
        """The trunk's own tokens up to the first that was not foreseen, that one included."""
        for i, draft in enumerate(drafts):
            answer.drafted[i] += 1
            if chosen[i] != draft:
                return chosen[: i + 1]
            answer.accepted[i] += 1
            if draft in self._stops:
                return chosen[: i + 1]
        return chosen


def _best(logits: Tensor) -> int:
    return int(logits[0].argmax())
