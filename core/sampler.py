"""Turns the logits of a step into tokens, with each request's own parameters, which live in buffers by slot.

Owns those buffers. Knows no queues and no KV. `enter` is called when a request gets its slot, `sample` once a
step; what a slot holds is a function of its request alone, so preemption and batch-mates leave no trace.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.request import Request
from headrace.ipc.messages import Sampling
from headrace.kernels.likeliest import likeliest
from headrace.kernels.random_uniform import Purpose, random_uniform
from headrace.kernels.sample import sample
from headrace.kernels.verify import Verified, leading, verify


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities under the model's own distribution, before penalties and temperature."""

    rows: tuple[int, ...]  # which of the S sampling positions asked
    chosen: Tensor  # [L] float32
    top_ids: Tensor  # [L, K] int64, likeliest first; K is the largest number asked for
    top: Tensor  # [L, K] float32


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step chose."""

    tokens: Tensor  # [S] int64; kernels.sample.INVALID_TOKEN where the logits held a NaN
    logprobs: LogprobRows | None
    accepted: Tensor | None = None  # [Q] int64: drafts of each row that stand; None = nobody had any


@dataclass(frozen=True, slots=True)
class Drafts:
    """What S positions verify: Q rows, each with its drafts behind one another."""

    starts: Tensor  # [Q + 1] int32: row q has positions starts[q]..starts[q + 1] - 1
    tokens: Tensor  # [S] int64: the draft of the next position; -1 at a row's last one
    probs: Tensor | None  # [N, V] float32: distributions that drafts were drawn from
    probs_at: Tensor | None  # [S] int64: row of `probs`; -1 = none, the draft is certain
    depths: Tensor  # [S] int64: drafts of the row before the position


@dataclass(frozen=True, slots=True)
class Guess:
    """One draft for each of R rows."""

    tokens: Tensor  # [R] int64
    confidence: (
        Tensor  # [R] float32: the drafter's probability of it; of its likeliest token if it was drawn freely
    )
    probs: Tensor | None  # [R, V] float32: before any cut; None = the likeliest was taken everywhere


def draws(sampling: Sampling, *, exact: bool) -> bool:
    """Whether the model's drafter draws freely, to be verified against its distribution; else by equality.

    A client that gave the seed gets the same tokens each time, and how much is drafted depends on the load. So its
    drafts are what the number that will choose the token would choose of the drafter's distribution: where the two
    distributions are alike they agree nearly as often as freely drawn drafts stand.
    """
    return sampling.temperature > 0 and not exact and not sampling.seeded


class Sampler:
    """Sampling state of every slot.

    The buffers of penalties, biases and minimum lengths are as wide as the vocabulary; each is made when the
    first request needs it.

    Args:
        max_num_seqs: number of slots.
        vocab_size: width of the logits.
        device: where the logits are.
        exact: drafts are never drawn freely, so no token depends on what was drafted.
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device, *, exact: bool = False
    ) -> None:
        self.exact = exact
        self._shape = (max_num_seqs, vocab_size)
        self._device = device
        self._temperature = torch.zeros(max_num_seqs, device=device)
        self._freely = torch.zeros(max_num_seqs, dtype=torch.bool, device=device)  # see `draws`
        self._top_k = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._top_p = torch.ones(max_num_seqs, device=device)
        self._min_p = torch.zeros(max_num_seqs, device=device)
        self._seed = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._penalties = torch.zeros(max_num_seqs, 3, device=device)  # presence, frequency, repetition
        self._counts: Tensor | None = None  # [N, V] int32: how often each token is in the output
        self._prompted: Tensor | None = None  # [N, V] bool: tokens of the prompt
        self._bias: Tensor | None = None  # [N, V] float32
        self._stops: Tensor | None = None  # [N, V] bool: tokens barred until `_earliest`
        self._earliest = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._random: set[int] = set()  # slots with a temperature
        self._penalised: set[int] = set()
        self._biased: set[int] = set()
        self._delayed: set[int] = set()
        self._logprobs: dict[int, int] = {}  # slot -> number of alternatives

    def enter(self, slot: int, request: Request) -> None:
        """Load the parameters of `request`, and the counts of what it has said, into `slot`."""
        params = request.sampling
        # Filled, for the assignment of a number waits for the card.
        self._temperature[slot].fill_(params.temperature)
        self._top_k[slot].fill_(min(params.top_k, self._shape[1]))
        self._top_p[slot].fill_(params.top_p)
        self._min_p[slot].fill_(params.min_p)
        self._seed[slot].fill_(params.seed)
        self._random.discard(slot)
        self._freely[slot].fill_(draws(params, exact=self.exact))
        if params.temperature:
            self._random.add(slot)
        self._logprobs.pop(slot, None)
        if params.logprobs >= 0:
            self._logprobs[slot] = params.logprobs
        self._enter_penalties(slot, request)
        self._enter_bias(slot, params)
        self._enter_minimum(slot, request)

    def is_plain(self, slots: Sequence[int]) -> bool:
        """No row asks for more than `choose` does."""
        return all(
            marks.isdisjoint(slots)
            for marks in (self._penalised, self._biased, self._delayed, self._logprobs.keys())
        )

    def choose(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Choose the token at `positions` of each row, by temperature and cuts alone; safe in a CUDA graph.

        Args:
            logits: [S, V] float32.
            slots: [S] int64.
            positions: [S] int64, index within its sequence of the token to choose.

        Returns:
            [S] int64; kernels.sample.INVALID_TOKEN where the logits held a NaN.
        """
        return sample(
            logits,
            self._temperature[slots],
            self._top_k[slots],
            self._top_p[slots],
            self._min_p[slots],
            random_uniform(self._seed[slots], positions, Purpose.SAMPLE),
        )

    def sample(self, logits: Tensor, slots: Tensor, slot_list: Sequence[int], positions: Tensor) -> Sampled:
        """`choose` with every rule of the rows, counted from then on, and with their log-probabilities.

        Args:
            logits: [S, V] float32; overwritten.
            slots: [S] int64, distinct.
            slot_list: the same numbers, on the host.
            positions: [S] int64, index within its sequence of the token to choose.
        """
        asked, raw = self._asked(logits, slot_list)
        self._adjust(logits, slots, slot_list, positions, None)
        # On a card the recorded kernel chooses, so that ties fall alike in every step.
        greedy = not logits.is_cuda and self._random.isdisjoint(slot_list)
        tokens = likeliest(logits) if greedy else self.choose(logits, slots, positions)
        if self._counts is not None and not self._penalised.isdisjoint(slot_list):
            self._counts[slots, tokens.clamp(min=0)] += 1
        return Sampled(tokens, self._logprobs_of(raw, tokens, asked, slot_list))

    def verify(
        self, logits: Tensor, slots: Tensor, slot_list: Sequence[int], positions: Tensor, drafts: Drafts
    ) -> Sampled:
        """`sample` for rows with drafts: the same rules, each position counting the drafts before it as said.

        Arguments as of `sample`, by position; a row's positions have one slot and follow each other.
        """
        asked, raw = self._asked(logits, slot_list)
        self._adjust(logits, slots, slot_list, positions, drafts)
        if not logits.is_cuda and self._random.isdisjoint(slot_list):
            tokens = likeliest(logits)
            # A row's last position has no draft, and a NaN no token: both are -1.
            right = (tokens == drafts.tokens) & (tokens >= 0)
            found = Verified(tokens, leading(right, drafts.starts))
        else:
            found = self.check(logits, slots, positions, drafts)
        if self._counts is not None and not self._penalised.isdisjoint(slot_list):
            owner = torch.repeat_interleave(drafts.starts.diff(), output_size=len(slot_list))
            said = (drafts.depths <= found.accepted[owner]) & (found.tokens >= 0)
            self._counts.index_put_((slots, found.tokens.clamp(min=0)), said.int(), accumulate=True)
        logprobs = self._logprobs_of(raw, found.tokens, asked, slot_list)
        return Sampled(found.tokens, logprobs, found.accepted)

    def check(self, logits: Tensor, slots: Tensor, positions: Tensor, drafts: Drafts) -> Verified:
        """`choose` for rows with drafts; safe in a CUDA graph."""
        seeds = self._seed[slots]
        return verify(
            logits,
            drafts.starts,
            drafts.tokens,
            drafts.probs,
            drafts.probs_at,
            self._temperature[slots],
            self._top_k[slots],
            self._top_p[slots],
            self._min_p[slots],
            random_uniform(seeds, positions, Purpose.ACCEPT),
            random_uniform(seeds, positions, Purpose.SAMPLE),
        )

    def draws_none(self, slot_list: Sequence[int]) -> bool:
        """All drafts for these slots are the likeliest tokens."""
        return self._random.isdisjoint(slot_list)

    def guess(self, logits: Tensor, slots: Tensor, positions: Tensor, *, greedy: bool) -> Guess:
        """Draft the token at `positions` of each row from the drafter's own logits; safe in a CUDA graph.

        Args:
            logits: [R, V] float32; a NaN counts as 0, for no draft may end a request.
            slots: [R] int64.
            positions: [R] int64, index within its sequence of the token to draft.
            greedy: `draws_none` of the slots.
        """
        logits = logits.nan_to_num(0.0)
        if greedy:
            best, tokens = logits.max(-1)
            return Guess(tokens, (best - logits.logsumexp(-1)).exp(), None)
        temperature, seeds, freely = self._temperature[slots], self._seed[slots], self._freely[slots]
        probs = (logits / temperature.where(temperature > 0, 1.0).unsqueeze(-1)).softmax(-1)
        draw, choose = (random_uniform(seeds, positions, for_) for for_ in (Purpose.DRAFT, Purpose.SAMPLE))
        tokens = sample(
            logits,
            temperature,
            self._top_k[slots].masked_fill(freely, 0),
            self._top_p[slots].masked_fill(freely, 1.0),
            self._min_p[slots].masked_fill(freely, 0.0),
            torch.where(freely, draw, choose),
        )
        # Not the probability of a freely drawn token: it would tell the planner which one was drawn, and drafts that
        # are verified for what they are come out more often than the model wants them.
        own = probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return Guess(tokens, torch.where(freely, probs.amax(-1), own), probs)

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
        self._penalties[slot].copy_(_send(torch.tensor(penalties), self._device))
        self._prompted[slot].zero_()
        prompt = _ids(request.token_ids[: request.prompt_len], self._device)
        self._prompted[slot].index_fill_(0, prompt, True)
        output = _ids(request.output_ids, self._device)
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
        self._bias[slot].index_copy_(0, _ids(ids, self._device), _send(torch.tensor(values), self._device))

    def _enter_minimum(self, slot: int, request: Request) -> None:
        params = request.sampling
        self._delayed.discard(slot)
        if not params.min_tokens or not params.stop_token_ids:
            return
        if self._stops is None:
            self._stops = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._delayed.add(slot)
        self._stops[slot].zero_()
        self._stops[slot].index_fill_(0, _ids(params.stop_token_ids, self._device), True)
        self._earliest[slot].fill_(request.prompt_len + params.min_tokens)

    def _asked(self, logits: Tensor, slot_list: Sequence[int]) -> tuple[tuple[int, ...], Tensor | None]:
        """Who wants log-probabilities, and a copy of their logits before any rule."""
        asked = tuple(row for row, slot in enumerate(slot_list) if slot in self._logprobs)
        return asked, logits[_ids(asked, self._device)] if asked else None

    def _logprobs_of(
        self, raw: Tensor | None, tokens: Tensor, asked: tuple[int, ...], slot_list: Sequence[int]
    ) -> LogprobRows | None:
        if raw is None:
            return None
        most = max(self._logprobs[slot_list[row]] for row in asked)
        return _logprobs(raw, tokens[_ids(asked, self._device)], asked, most)

    def _adjust(
        self,
        logits: Tensor,
        slots: Tensor,
        slot_list: Sequence[int],
        positions: Tensor,
        drafts: Drafts | None,
    ) -> None:
        """Apply penalties, biases and minimum lengths to the rows that have them, in place."""
        rows = [row for row, slot in enumerate(slot_list) if slot in self._penalised]
        if rows:
            assert self._counts is not None
            assert self._prompted is not None
            at = _ids(rows, self._device)
            held = slots[at]
            presence, frequency, repetition = self._penalties[held].unsqueeze(-1).unbind(1)
            counts, part = self._counts[held], logits[at]
            if drafts is not None:
                counts = counts + _drafted_before(drafts, rows, self._shape[1])
            seen = (counts > 0) | self._prompted[held]
            part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
            logits[at] = part - presence * (counts > 0) - frequency * counts
        rows = [row for row, slot in enumerate(slot_list) if slot in self._biased]
        if rows:
            assert self._bias is not None
            at = _ids(rows, self._device)
            logits[at] += self._bias[slots[at]]
        rows = [row for row, slot in enumerate(slot_list) if slot in self._delayed]
        if rows:
            assert self._stops is not None
            at = _ids(rows, self._device)
            held = slots[at]
            barred = self._stops[held] & (positions[at] < self._earliest[held]).unsqueeze(-1)
            logits[at] = logits[at].masked_fill(barred, float("-inf"))


def _drafted_before(drafts: Drafts, rows: Sequence[int], vocab_size: int) -> Tensor:
    """[P, V] int32: how often each token is among the drafts before each of the P positions `rows`."""
    said = torch.zeros(len(drafts.tokens) + 1, vocab_size, dtype=torch.int32, device=drafts.tokens.device)
    places = torch.arange(1, len(said), device=said.device)
    said[places, drafts.tokens.clamp(min=0)] = (drafts.tokens >= 0).int()
    # A running sum over all positions; what it was at a row's first one belongs to the rows before.
    said = said.cumsum(0, dtype=torch.int32)
    at = _ids(rows, said.device)
    return said[at] - said[at - drafts.depths[at]]


def _logprobs(raw: Tensor, tokens: Tensor, rows: tuple[int, ...], count: int) -> LogprobRows:
    values = torch.log_softmax(raw, dim=-1)
    chosen = values.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    top = values.topk(min(count, values.shape[-1]), dim=-1)
    return LogprobRows(rows, chosen, top.indices, top.values)


def _ids(ids: Sequence[int], device: torch.device) -> Tensor:
    return _send(torch.tensor(ids, dtype=torch.int64), device)


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    # From pinned memory the copy does not wait; torch keeps the pages until it is done.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
