"""Turns the logits of a step into tokens, with each request's own parameters, which live in buffers by slot.

Owns those buffers. Knows no queues and no KV. `enter` is called when a request gets its slot, `sample` once a
step; what a slot holds is a function of its request alone, so preemption and batch-mates leave no trace.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.logit_rules import LogitRules, ids_on
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
    """Sampling state of every slot; penalties and the like are core/logit_rules.py's.

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
        self._rules = LogitRules(max_num_seqs, vocab_size, device)
        self._random: set[int] = set()  # slots with a temperature
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
        self._rules.enter(slot, request)

    def is_plain(self, slots: Sequence[int]) -> bool:
        """No row asks for more than `choose` does."""
        return self._rules.leave_alone(slots) and self._logprobs.keys().isdisjoint(slots)

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
        self._rules.adjust(logits, slots, slot_list, positions, None)
        # On a card the recorded kernel chooses, so that ties fall alike in every step.
        greedy = not logits.is_cuda and self._random.isdisjoint(slot_list)
        tokens = likeliest(logits) if greedy else self.choose(logits, slots, positions)
        if self._rules.counts_for(slot_list):
            self._rules.said(slots, tokens.clamp(min=0), torch.ones_like(tokens, dtype=torch.int32))
        return Sampled(tokens, self._logprobs_of(raw, tokens, asked, slot_list))

    def verify(
        self, logits: Tensor, slots: Tensor, slot_list: Sequence[int], positions: Tensor, drafts: Drafts
    ) -> Sampled:
        """`sample` for rows with drafts: the same rules, each position counting the drafts before it as said.

        Arguments as of `sample`, by position; a row's positions have one slot and follow each other.
        """
        asked, raw = self._asked(logits, slot_list)
        self._rules.adjust(logits, slots, slot_list, positions, (drafts.tokens, drafts.depths))
        if not logits.is_cuda and self._random.isdisjoint(slot_list):
            tokens = likeliest(logits)
            # A row's last position has no draft, and a NaN no token: both are -1.
            right = (tokens == drafts.tokens) & (tokens >= 0)
            found = Verified(tokens, leading(right, drafts.starts))
        else:
            found = self.check(logits, slots, positions, drafts)
        if self._rules.counts_for(slot_list):
            owner = torch.repeat_interleave(drafts.starts.diff(), output_size=len(slot_list))
            said = (drafts.depths <= found.accepted[owner]) & (found.tokens >= 0)
            self._rules.said(slots, found.tokens.clamp(min=0), said.int())
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

    def _asked(self, logits: Tensor, slot_list: Sequence[int]) -> tuple[tuple[int, ...], Tensor | None]:
        """Who wants log-probabilities, and a copy of their logits before any rule."""
        asked = tuple(row for row, slot in enumerate(slot_list) if slot in self._logprobs)
        return asked, logits[ids_on(asked, self._device)] if asked else None

    def _logprobs_of(
        self, raw: Tensor | None, tokens: Tensor, asked: tuple[int, ...], slot_list: Sequence[int]
    ) -> LogprobRows | None:
        if raw is None:
            return None
        most = max(self._logprobs[slot_list[row]] for row in asked)
        return _logprobs(raw, tokens[ids_on(asked, self._device)], asked, most)


def _logprobs(raw: Tensor, tokens: Tensor, rows: tuple[int, ...], count: int) -> LogprobRows:
    values = torch.log_softmax(raw, dim=-1)
    chosen = values.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    top = values.topk(min(count, values.shape[-1]), dim=-1)
    return LogprobRows(rows, chosen, top.indices, top.values)
