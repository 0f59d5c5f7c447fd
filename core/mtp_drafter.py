"""Drafts by the checkpoint's own MTP module, run behind a step over the hidden states that the step made.

Owns the distributions that drafts were drawn from, by slot. Knows no request. Called by core/execute.py, and inside
recorded steps by core/draft_graphs.py.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.models.base import MtpHead
from headrace.core.sampler import Guess, Sampler

# On a CPU a further guess costs a fifth of a step, so it must stand this often to be worth making.
LEAST_HOPE = 0.4


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The Q rows to draft for, each behind one position of the step."""

    last: Tensor  # [Q] int64: index into the step's query tokens of the one whose following token was just chosen
    positions: Tensor  # [Q] int64: where that query token stands
    slots: Tensor  # [Q] int64
    block_tables: Tensor  # [Q, B] int32; block 0 where the row has none


@dataclass(frozen=True, slots=True)
class Drafted:
    """What was drafted, K tokens deep."""

    tokens: Tensor  # [Q, K] int64; -1 where the drafter gave up before
    confidences: Tensor  # [Q, K] float32: the module's own probability of each


class MtpDrafter:
    """Applies the first MTP module to a step, then to its own outputs.

    A pair (hidden state of a position, token behind it) leaves its KV at that position, in the module's own layer.
    `absorb` does that for the step's positions, `draft` goes on from the newest pair with guessed ones, whose KV the
    next step's `absorb` overwrites. Deeper modules, where a checkpoint has them, are not used: their KV would have
    to follow every step as well.

    Args:
        mtp: of the model.
        kv: the pool, with the modules' layers.
        sampler: draws the drafts.
        depth: most tokens ahead.
        num_slots: of the sampler.
        vocab_size: width of the logits.
        max_model_len: positions of the longest request.
    """

    def __init__(
        self,
        mtp: MtpHead,
        kv: Tensor,
        sampler: Sampler,
        *,
        depth: int,
        num_slots: int,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self.depth = depth
        self.gives_up = True  # on a CPU, where guesses are unlikely to stand; off while it is timed
        self._mtp = mtp
        self._kv = kv
        self._sampler = sampler
        self._last_position = max_model_len - 1
        self._max_model_len = max_model_len
        self._block_size = kv.shape[-2] if kv.ndim == 4 else kv.shape[-3]
        self.probs: Tensor | None = None
        if not sampler.exact:
            self.probs = torch.zeros(num_slots * depth, vocab_size, device=kv.device)

    def absorb(self, batch: Batch, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """Run over all of a step's positions.

        Args:
            batch: the step's.
            hidden: [T, D] that the model made of it.
            next_ids: [T] int64, the token behind each query token.

        Returns:
            [T, D]; `draft` takes the rows it needs.
        """
        return self._mtp.forward(replace(batch, token_ids=next_ids), self._mtp.features(hidden), self._kv)

    def draft(self, hidden: Tensor, rows: DraftRows, ahead: int, *, greedy: bool) -> Drafted:
        """Guess `ahead` tokens for each row; safe in a CUDA graph.

        Args:
            hidden: [Q, D], what `absorb` returned at `rows.last`.
            rows: whom for.
            ahead: 1..depth.
            greedy: none of these slots wants its drafts drawn.
        """
        if hidden.is_cuda:
            return self._draft_all(hidden, rows, ahead, greedy=greedy)
        return self._draft_hopeful(hidden, rows, ahead, greedy=greedy)

    def _draft_all(self, hidden: Tensor, rows: DraftRows, ahead: int, *, greedy: bool) -> Drafted:
        guesses: list[Guess] = []
        positions = rows.positions
        for place in range(ahead):
            if place:
                positions = (positions + 1).clamp(max=self._last_position)
                batch = self._batch(guesses[-1].tokens, positions, rows.block_tables)
                hidden = self._mtp.forward(batch, hidden, self._kv)
            guesses.append(self._guess(hidden, rows.slots, positions + 2, place, greedy=greedy))
        return Drafted(
            torch.stack([guess.tokens for guess in guesses], 1),
            torch.stack([guess.confidence for guess in guesses], 1),
        )

    def _draft_hopeful(self, hidden: Tensor, rows: DraftRows, ahead: int, *, greedy: bool) -> Drafted:
        """The same, but only rows whose guesses so far may well be right go on: nothing waits for a CPU."""
        shape = (len(rows.slots), ahead)
        drafted = Drafted(torch.full(shape, -1), torch.zeros(shape))
        alive, positions, slots, tables = (
            torch.arange(shape[0]),
            rows.positions,
            rows.slots,
            rows.block_tables,
        )
        guess = self._guess(hidden, slots, positions + 2, 0, greedy=greedy)
        tokens, hope = guess.tokens, guess.confidence
        for place in range(ahead):
            drafted.tokens[alive, place], drafted.confidences[alive, place] = tokens, guess.confidence
            kept = (hope >= (LEAST_HOPE if self.gives_up else 0.0)).nonzero()[:, 0]
            if place == ahead - 1 or not len(kept):
                break
            if len(kept) < len(alive):
                alive, tokens, hope, hidden = alive[kept], tokens[kept], hope[kept], hidden[kept]
                positions, slots, tables = positions[kept], slots[kept], tables[kept]
            positions = (positions + 1).clamp(max=self._last_position)
            hidden = self._mtp.forward(self._batch(tokens, positions, tables), hidden, self._kv)
            guess = self._guess(hidden, slots, positions + 2, place + 1, greedy=greedy)
            tokens, hope = guess.tokens, hope * guess.confidence
        return drafted

    def _guess(self, hidden: Tensor, slots: Tensor, positions: Tensor, place: int, *, greedy: bool) -> Guess:
        guess = self._sampler.guess(self._mtp.logits(hidden), slots, positions, greedy=greedy)
        if guess.probs is not None and self.probs is not None:
            self.probs[slots * self.depth + place] = guess.probs
        return guess

    def probs_at(self, slots: Tensor, depths: Tensor, sampled: Tensor) -> Tensor:
        """Rows of `probs` of the drafts at these depths; -1 where none was drawn. All [S]."""
        return torch.where(sampled, slots * self.depth + depths, -1)

    def _batch(self, token_ids: Tensor, positions: Tensor, tables: Tensor) -> Batch:
        count = len(positions)
        in_table = positions // self._block_size
        blocks = tables.gather(1, in_table.unsqueeze(1)).squeeze(1).long()
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=blocks * self._block_size + positions % self._block_size,
            query_starts=torch.arange(count + 1, dtype=torch.int32, device=positions.device),
            context_lens=(positions + 1).int(),
            block_tables=tables,
            num_decodes=count,
            max_query_len=1,
            max_context_len=self._max_model_len,
        )
