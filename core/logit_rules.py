"""What changes logits before a token is chosen: penalties, biases, minimum lengths, in buffers by slot.

Owns those buffers, and the counts of what each request has said. Knows no choice and no draft's fate: core/sampler.py
tells it what was said.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.core.request import Request
from headrace.ipc.messages import Sampling


class LogitRules:
    """The rules of every slot. A buffer as wide as the vocabulary is made when the first request needs it.

    Args:
        max_num_seqs: number of slots.
        vocab_size: width of the logits.
        device: where the logits are.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._device = device
        self._penalties = torch.zeros(max_num_seqs, 3, device=device)  # presence, frequency, repetition
        self._counts: Tensor | None = None  # [N, V] int32: how often each token is in the output
        self._prompted: Tensor | None = None  # [N, V] bool: tokens of the prompt
        self._bias: Tensor | None = None  # [N, V] float32
        self._stops: Tensor | None = None  # [N, V] bool: tokens barred until `_earliest`
        self._earliest = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._penalised: set[int] = set()
        self._biased: set[int] = set()
        self._delayed: set[int] = set()

    def enter(self, slot: int, request: Request) -> None:
        """Load the rules of `request`, and the counts of what it has said, into `slot`."""
        self._enter_penalties(slot, request)
        self._enter_bias(slot, request.sampling)
        self._enter_minimum(slot, request)

    def leave_alone(self, slots: Sequence[int]) -> bool:
        """None of these slots has a rule."""
        return all(marks.isdisjoint(slots) for marks in (self._penalised, self._biased, self._delayed))

    def counts_for(self, slots: Sequence[int]) -> bool:
        """What one of these slots says must be told to `said`."""
        return not self._penalised.isdisjoint(slots)

    def said(self, slots: Tensor, tokens: Tensor, times: Tensor) -> None:
        """Count tokens [S] int64, at least 0, of slots [S] so many times [S] int32 each."""
        if self._counts is not None:
            self._counts.index_put_((slots, tokens), times, accumulate=True)

    def _enter_penalties(self, slot: int, request: Request) -> None:
        params = request.sampling
        self._penalised.discard(slot)
        if not (params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1):
            return
        if self._counts is None or self._prompted is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._prompted = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._penalised.add(slot)
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        self._penalties[slot].copy_(send(torch.tensor(penalties), self._device))
        self._prompted[slot].zero_()
        prompt = ids_on(request.token_ids[: request.prompt_len], self._device)
        self._prompted[slot].index_fill_(0, prompt, True)
        output = ids_on(request.output_ids, self._device)
        self._counts[slot].zero_()
        # Not bincount, which waits for the card to learn its own length.
        self._counts[slot].scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _enter_bias(self, slot: int, params: Sampling) -> None:
        self._biased.discard(slot)
        if not params.logit_bias:
            return
        if self._bias is None:
            self._bias = torch.zeros(self._shape, device=self._device)
        self._biased.add(slot)
        ids, values = zip(*params.logit_bias, strict=True)
        self._bias[slot].zero_()
        self._bias[slot].index_copy_(0, ids_on(ids, self._device), send(torch.tensor(values), self._device))

    def _enter_minimum(self, slot: int, request: Request) -> None:
        params = request.sampling
        self._delayed.discard(slot)
        if not params.min_tokens or not params.stop_token_ids:
            return
        if self._stops is None:
            self._stops = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._delayed.add(slot)
        self._stops[slot].zero_()
        self._stops[slot].index_fill_(0, ids_on(params.stop_token_ids, self._device), True)
        self._earliest[slot].fill_(request.prompt_len + params.min_tokens)

    def adjust(
        self,
        logits: Tensor,
        slots: Tensor,
        slot_list: Sequence[int],
        positions: Tensor,
        drafted: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Apply the rules to the rows that have them, in place.

        Args:
            logits: [S, V] float32.
            slots: [S] int64.
            slot_list: the same numbers, on the host.
            positions: [S] int64, index within its sequence of the token to choose.
            drafted: [S] int64 the draft behind each position, -1 = none, and [S] int64 how many drafts of its row
                are before it: they count as said. None = nobody has any.
        """
        rows = [row for row, slot in enumerate(slot_list) if slot in self._penalised]
        if rows:
            assert self._counts is not None
            assert self._prompted is not None
            at = ids_on(rows, self._device)
            held = slots[at]
            presence, frequency, repetition = self._penalties[held].unsqueeze(-1).unbind(1)
            counts, part = self._counts[held], logits[at]
            if drafted is not None:
                counts = counts + _drafted_before(*drafted, rows, self._shape[1])
            seen = (counts > 0) | self._prompted[held]
            part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
            logits[at] = part - presence * (counts > 0) - frequency * counts
        rows = [row for row, slot in enumerate(slot_list) if slot in self._biased]
        if rows:
            assert self._bias is not None
            at = ids_on(rows, self._device)
            logits[at] += self._bias[slots[at]]
        rows = [row for row, slot in enumerate(slot_list) if slot in self._delayed]
        if rows:
            assert self._stops is not None
            at = ids_on(rows, self._device)
            held = slots[at]
            barred = self._stops[held] & (positions[at] < self._earliest[held]).unsqueeze(-1)
            logits[at] = logits[at].masked_fill(barred, float("-inf"))


def _drafted_before(drafts: Tensor, depths: Tensor, rows: Sequence[int], vocab_size: int) -> Tensor:
    """[P, V] int32: how often each token is among the drafts before each of the P positions `rows`."""
    said = torch.zeros(len(drafts) + 1, vocab_size, dtype=torch.int32, device=drafts.device)
    places = torch.arange(1, len(said), device=said.device)
    said[places, drafts.clamp(min=0)] = (drafts >= 0).int()
    # A running sum over all positions; what it was at a row's first one belongs to the rows before.
    said = said.cumsum(0, dtype=torch.int32)
    at = ids_on(rows, said.device)
    return said[at] - said[at - depths[at]]


def ids_on(ids: Sequence[int], device: torch.device) -> Tensor:
    """[len(ids)] int64."""
    return send(torch.tensor(ids, dtype=torch.int64), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor, on the device."""
    # From pinned memory the copy does not wait; torch keeps the pages until it is done.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
