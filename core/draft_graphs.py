"""Recorded steps that verify drafts and make new ones: CUDA graphs by query tokens, whatever rows they belong to.

Three parts, for each can be replayed alone: the model and the verification; the drafter following the step; its
guesses beyond. Owns the graphs and their static inputs. Knows no request. Built by core/build.py, used by execute.py.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.execute import Verifiable
from headrace.core.models.base import Model
from headrace.core.mtp_drafter import Drafted, DraftRows, MtpDrafter
from headrace.core.prepare import StepInputs
from headrace.core.sampler import Drafts, Sampler
from headrace.core.staging import Staging
from headrace.ipc.limits import MAX_DRAFTS

MOST_TOKENS = 256  # of a recorded step; where so many pay, the batch is so large that drafts hardly do
MOST_ROWS = 128
TOKEN_SIZES = (
    *range(1, 11), 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256,
)  # fmt: skip
ROW_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Recorded(Generic[R]):
    graph: torch.cuda.CUDAGraph
    result: R


class DraftGraphs:
    """Recorded steps of decodes, each of 1..1 + MAX_DRAFTS query tokens.

    A graph for T query tokens has T rows: the step's, one for each padded token, and empty ones. Padding lies in
    block 0, which nobody owns, and in the sampler's spare slot.

    Args:
        model, kv, sampler: of the executor, which must outlive this.
        drafter: of the executor; None = drafts come from the host alone.
        max_num_seqs: slots; the one behind them is the spare.
        max_num_batched_tokens: query tokens of the largest step.
        max_model_len: positions of the longest request.
        block_size: tokens of a block.
        largest_only: record the largest graph of each part alone, to see what they take.
    """

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        sampler: Sampler,
        drafter: MtpDrafter | None,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        largest_only: bool = False,
    ) -> None:
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._drafter = drafter
        self._spare = max_num_seqs
        self._max_model_len = max_model_len
        most = min(MOST_TOKENS, max_num_batched_tokens, max_num_seqs * (1 + MAX_DRAFTS))
        self.token_sizes = _up_to(TOKEN_SIZES, most)
        self.row_sizes = _up_to(ROW_SIZES, min(MOST_ROWS, max_num_seqs, most))
        if largest_only:
            self.token_sizes, self.row_sizes = self.token_sizes[-1:], self.row_sizes[-1:]
        tokens, width = self.token_sizes[-1], -(-(max_model_len + MAX_DRAFTS) // block_size)
        # [6, T]: token ids, positions, slot mapping, slots, drafts, rows of the drafts' distributions; slots of
        # the rows [T]. Then the rows' starts [T + 1], context lengths [T] and block tables [T, B].
        fields = (
            (torch.int64, (6, tokens)),
            (torch.int64, (tokens,)),
            (torch.int32, (tokens + 1,)),
            (torch.int32, (tokens,)),
            (torch.int32, (tokens, width)),
        )
        self._staging = Staging(fields, kv.device)
        self._longs, self._row_slots, self._starts, self._context_lens, self._tables = self._staging.place
        self._tokens = torch.zeros(tokens, dtype=torch.int64, device=kv.device)
        self._accepted = torch.zeros(tokens, dtype=torch.int64, device=kv.device)
        shape = (tokens + 1, model.spec.hidden_size)
        # First the model's, then what the drafter made of them. One more, for rows that are not there.
        self._hidden = torch.zeros(shape, dtype=model.dtype, device=kv.device)
        self._edge = MAX_DRAFTS // block_size + 1  # entries of a table that a padded row may look at
        self._pool = torch.cuda.graph_pool_handle()
        sizes = tuple(reversed(self.token_sizes))
        self._verify = {size: self._record(partial(self._step, size)) for size in sizes}
        self._absorb: dict[int, _Recorded[None]] = {}
        self._guess: dict[tuple[int, bool], _Recorded[Drafted]] = {}
        if drafter is not None:
            self._absorb = {size: self._record(partial(self._follow, size)) for size in sizes}
            for greedy in (True, False):
                for size in reversed(self.row_sizes):
                    recorded = self._record(partial(self._beyond, size, greedy))
                    self._guess[size, greedy] = recorded

    def fits(self, inputs: StepInputs) -> bool:
        """Whether a recorded step can stand in for these inputs."""
        tokens, rows = inputs.num_tokens, len(inputs.context_lens)
        return (
            tokens == len(inputs.sample_at)
            and tokens <= self.token_sizes[-1]
            and rows <= self.row_sizes[-1]
            and inputs.max_query_len <= 1 + MAX_DRAFTS
            and (not inputs.ahead or self._drafter is not None)
        )

    def run(self, inputs: StepInputs) -> Verifiable:
        """Replay the first part."""
        tokens, rows = inputs.num_tokens, len(inputs.context_lens)
        size = _at_least(self.token_sizes, tokens)
        self._fill(self._staging.next(), inputs, size)
        self._staging.send(max(rows + size - tokens, _at_least(self.row_sizes, rows)))
        recorded = self._verify[size]
        recorded.graph.replay()
        return Verifiable(recorded.result[:tokens], self._tokens[:tokens], self._accepted[:rows])

    def draft(self, inputs: StepInputs, *, greedy: bool) -> Drafted:
        """Replay the others behind it: as many tokens as the drafter's depth for each row."""
        rows = len(inputs.context_lens)
        self._absorb[_at_least(self.token_sizes, inputs.num_tokens)].graph.replay()
        recorded = self._guess[_at_least(self.row_sizes, rows), greedy]
        recorded.graph.replay()
        return Drafted(recorded.result.tokens[:rows], recorded.result.confidences[:rows])

    def _fill(self, arrays: tuple[NDArray[Any], ...], inputs: StepInputs, size: int) -> None:
        longs, row_slots, starts, context_lens, tables = arrays
        tokens, rows = inputs.num_tokens, len(inputs.context_lens)
        padded = rows + size - tokens
        for at, values in enumerate(
            (inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.sample_slots)
        ):
            longs[at, :tokens] = values
        longs[4:, :tokens] = -1
        if inputs.drafts is not None:
            longs[4, :tokens] = inputs.drafts.tokens
            if self._drafter is not None:
                places = inputs.sample_slots * self._drafter.depth + inputs.drafts.depths
                longs[5, :tokens] = np.where(inputs.drafts.sampled, places, -1)
        longs[:, tokens:size] = _PADDING
        longs[3, tokens:size] = self._spare
        row_slots[:rows] = inputs.sample_slots[inputs.query_starts[:-1]]
        row_slots[rows:] = self._spare
        starts[: rows + 1] = inputs.query_starts
        starts[rows : padded + 1] = np.arange(tokens, size + 1)
        starts[padded:] = size
        context_lens[:rows] = inputs.context_lens
        context_lens[rows:] = 1
        tables[:rows, : inputs.block_tables.shape[1]] = inputs.block_tables
        tables[rows:, : self._edge] = 0

    @torch.inference_mode()
    def _record(self, part: Callable[[], R]) -> "_Recorded[R]":
        part()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = part()
        return _Recorded(graph, result)

    def _step(self, size: int) -> Tensor:
        batch = self._batch(size)
        hidden = self._model.forward(batch, self._kv)
        self._hidden[:size] = hidden
        logits = self._model.logits(hidden)
        slots, drafts, probs_at = self._longs[3:, :size].unbind(0)
        probs = None if self._drafter is None else self._drafter.probs
        found = self._sampler.check(
            logits,
            slots,
            batch.positions + 1,
            Drafts(batch.query_starts, drafts, probs, None if probs is None else probs_at, slots),
        )
        self._tokens[:size] = found.tokens
        self._accepted[:size] = found.accepted
        return logits

    def _follow(self, size: int) -> None:
        assert self._drafter is not None
        next_ids = self._tokens[:size].clamp(min=0)
        self._hidden[:size] = self._drafter.absorb(self._batch(size), self._hidden[:size], next_ids)

    def _beyond(self, size: int, greedy: bool) -> Drafted:
        assert self._drafter is not None
        slots, most = self._row_slots[:size], self._hidden.shape[0] - 1
        last = (self._starts[:size] + self._accepted[:size]).clamp(max=most)
        positions = self._longs[1].index_select(0, last.clamp(max=most - 1))
        rows = DraftRows(
            last=last,
            positions=positions.where(slots != self._spare, 0),
            slots=slots,
            block_tables=self._tables[:size],
        )
        hidden = self._hidden.index_select(0, last)
        return self._drafter.draft(hidden, rows, self._drafter.depth, greedy=greedy)

    def _batch(self, size: int) -> Batch:
        longest = min(1 + MAX_DRAFTS, size)
        return Batch(
            token_ids=self._longs[0, :size],
            positions=self._longs[1, :size],
            slot_mapping=self._longs[2, :size],
            query_starts=self._starts[: size + 1],
            context_lens=self._context_lens[:size],
            block_tables=self._tables[:size],
            num_decodes=0 if longest > 1 else size,
            max_query_len=longest,
            max_context_len=self._max_model_len,
        )


# A padded query token: token 0 at position 0 in cell 0, no slot yet, no draft.
_PADDING = np.array([[0], [0], [0], [0], [-1], [-1]])


def _up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    return (*(size for size in sizes if size < most), most)


def _at_least(sizes: Sequence[int], count: int) -> int:
    return sizes[bisect.bisect_left(sizes, count)]
