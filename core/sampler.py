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


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities under the model's own distribution, before penalties and temperature."""

    rows: tuple[int, ...]  # which of the S sampling rows asked
    chosen: Tensor  # [L] float32
    top_ids: Tensor  # [L, K] int64, likeliest first; K is the largest number asked for
    top: Tensor  # [L, K] float32


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step chose."""

    tokens: Tensor  # [S] int64; kernels.sample.INVALID_TOKEN where the logits held a NaN
    logprobs: LogprobRows | None


class Sampler:
    """Sampling state of every slot.

    The buffers of penalties, biases and minimum lengths are as wide as the vocabulary; each is made when the
    first request needs it.

    Args:
        max_num_seqs: number of slots.
        vocab_size: width of the logits.
        device: where the logits are.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._device = device
        self._temperature = torch.zeros(max_num_seqs, device=device)
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
        self._temperature[slot] = params.temperature
        self._top_k[slot] = min(params.top_k, self._shape[1])
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = params.seed
        self._random.discard(slot)
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
        asked = tuple(row for row, slot in enumerate(slot_list) if slot in self._logprobs)
        raw = logits[list(asked)] if asked else None
        self._adjust(logits, slots, slot_list, positions)
        # On a card the recorded kernel chooses, so that ties fall alike in every step.
        greedy = not logits.is_cuda and self._random.isdisjoint(slot_list)
        tokens = likeliest(logits) if greedy else self.choose(logits, slots, positions)
        if self._counts is not None and not self._penalised.isdisjoint(slot_list):
            self._counts[slots, tokens.clamp(min=0)] += 1
        logprobs = None
        if raw is not None:
            most = max(self._logprobs[slot_list[row]] for row in asked)
            logprobs = _logprobs(raw, tokens[list(asked)], asked, most)
        return Sampled(tokens, logprobs)

    def _enter_penalties(self, slot: int, request: Request) -> None:
        params = request.sampling
        self._penalised.discard(slot)
        if not (params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1):
            return
        if self._counts is None or self._prompted is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._prompted = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._penalised.add(slot)
        self._penalties[slot] = torch.tensor(
            [params.presence_penalty, params.frequency_penalty, params.repetition_penalty]
        )
        self._prompted[slot] = False
        self._prompted[slot, _ids(request.token_ids[: request.prompt_len], self._device)] = True
        output = _ids(request.output_ids, self._device)
        self._counts[slot] = torch.bincount(output, minlength=self._shape[1])

    def _enter_bias(self, slot: int, params: Sampling) -> None:
        self._biased.discard(slot)
        if not params.logit_bias:
            return
        if self._bias is None:
            self._bias = torch.zeros(self._shape, device=self._device)
        self._biased.add(slot)
        ids, values = zip(*params.logit_bias, strict=True)
        self._bias[slot] = 0
        self._bias[slot, _ids(ids, self._device)] = torch.tensor(values, device=self._device)

    def _enter_minimum(self, slot: int, request: Request) -> None:
        params = request.sampling
        self._delayed.discard(slot)
        if not params.min_tokens or not params.stop_token_ids:
            return
        if self._stops is None:
            self._stops = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._delayed.add(slot)
        self._stops[slot] = False
        self._stops[slot, _ids(params.stop_token_ids, self._device)] = True
        self._earliest[slot] = request.prompt_len + params.min_tokens

    def _adjust(self, logits: Tensor, slots: Tensor, slot_list: Sequence[int], positions: Tensor) -> None:
        """Apply penalties, biases and minimum lengths to the rows that have them, in place."""
        rows = [row for row, slot in enumerate(slot_list) if slot in self._penalised]
        if rows:
            assert self._counts is not None
            assert self._prompted is not None
            held = slots[rows]
            presence, frequency, repetition = self._penalties[held].unsqueeze(-1).unbind(1)
            counts, part = self._counts[held], logits[rows]
            seen = (counts > 0) | self._prompted[held]
            part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
            logits[rows] = part - presence * (counts > 0) - frequency * counts
        rows = [row for row, slot in enumerate(slot_list) if slot in self._biased]
        if rows:
            assert self._bias is not None
            logits[rows] += self._bias[slots[rows]]
        rows = [row for row, slot in enumerate(slot_list) if slot in self._delayed]
        if rows:
            assert self._stops is not None
            held = slots[rows]
            barred = self._stops[held] & (positions[rows] < self._earliest[held]).unsqueeze(-1)
            logits[rows] = logits[rows].masked_fill(barred, float("-inf"))


def _logprobs(raw: Tensor, tokens: Tensor, rows: tuple[int, ...], count: int) -> LogprobRows:
    values = torch.log_softmax(raw, dim=-1)
    chosen = values.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    top = values.topk(min(count, values.shape[-1]), dim=-1)
    return LogprobRows(rows, chosen, top.indices, top.values)


def _ids(ids: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=device)
