"""Recorded decode steps: one CUDA graph for each number of query tokens, sampling included.

Owns the graphs; their static inputs are core/staging.py's. Knows no request. Built by core/build.py on a card, used
by execute.py.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.capture import undisturbed
from headrace.core.execute import Executor
from headrace.core.models.base import Model
from headrace.core.prepare import StepInputs
from headrace.core.staging import Staging


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of query tokens worth a graph: 1, 2, 4, then every 8, from 256 on every 32, and the largest batch."""
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 32))
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [N, V]
    tokens: Tensor  # [N]


class DecodeGraphs:
    """Implements execute.py's StepGraphs for steps in which every row has one query token.

    Padded rows have context length 1 on block 0, which nobody owns, and the sampler's spare slot. The graphs share
    one memory pool, so they are recorded largest first, and the outputs of a replay last until the next one.

    Args:
        executor: whose model, KV pool, sampler and last tokens are recorded; it must outlive this.
        model: the executor's.
        kv: the executor's.
        max_num_seqs: slots; the one behind them is the spare.
        max_model_len: positions of the longest request.
        block_size: tokens of a block.
        sizes: rows of each graph, rising; None = `graph_sizes` of the slots.
    """

    def __init__(
        self,
        executor: Executor,
        model: Model,
        kv: Tensor,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self._executor = executor
        self._model = model
        self._kv = kv
        self._spare = max_num_seqs
        self._max_model_len = max_model_len
        self._sizes = list(sizes or graph_sizes(max_num_seqs))
        rows, width = self._sizes[-1], -(-max_model_len // block_size)
        # [5, N]: token ids, positions, slot mapping, slots, 1 where the device knows the token. Then context
        # lengths [N] and block tables [N, B]. Rows beyond the step's are padding.
        fields = ((torch.int64, (5, rows)), (torch.int32, (rows,)), (torch.int32, (rows, width)))
        self._staging = Staging(fields, kv.device)
        self._longs, self._context_lens, self._block_tables = self._staging.place
        self._longs[3] = self._spare
        self._context_lens.fill_(1)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=kv.device)
        self._recorded = self._record(self._sizes)

    def fits(self, inputs: StepInputs) -> bool:
        """See StepGraphs."""
        rows = inputs.num_tokens
        return inputs.num_decodes == rows == len(inputs.sample_at) and rows <= self._sizes[-1]

    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """See StepGraphs."""
        rows = inputs.num_tokens
        size = self._sizes[bisect.bisect_left(self._sizes, rows)]
        self._fill(self._staging.next(), inputs, size)
        self._staging.send(size)
        return self.replay(rows)

    def replay(self, rows: int) -> tuple[Tensor, Tensor]:
        """`run` over the inputs that lie there already."""
        recorded = self._recorded[self._sizes[bisect.bisect_left(self._sizes, rows)]]
        recorded.graph.replay()
        return recorded.logits[:rows], recorded.tokens[:rows]

    def _fill(self, arrays: tuple[NDArray[Any], ...], inputs: StepInputs, size: int) -> None:
        rows = inputs.num_tokens
        longs, lengths, tables = arrays
        for row, values in enumerate(
            (inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.sample_slots)
        ):
            longs[row, :rows] = values
        longs[4, :rows] = 0
        longs[4, inputs.unknown_at] = 1
        longs[:, rows:size] = np.array([[0], [0], [0], [self._spare], [0]])
        lengths[:rows] = inputs.context_lens
        lengths[rows:size] = 1
        tables[:rows, : inputs.block_tables.shape[1]] = inputs.block_tables
        tables[rows:size, 0] = 0

    @undisturbed()
    @torch.inference_mode()
    def _record(self, sizes: Sequence[int]) -> dict[int, _Recorded]:
        pool = torch.cuda.graph_pool_handle()
        recorded: dict[int, _Recorded] = {}
        for size in reversed(sizes):
            self._step(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits, tokens = self._step(size)
            recorded[size] = _Recorded(graph, logits, tokens)
        return recorded

    def _step(self, rows: int) -> tuple[Tensor, Tensor]:
        """What is recorded: exactly the executor's step, with the unknown tokens looked up by slot."""
        given, positions, slot_mapping, slots, unknown = self._longs[:, :rows].unbind(0)
        last_token = self._executor.last_token
        batch = Batch(
            token_ids=torch.where(unknown > 0, last_token[slots], given),
            positions=positions,
            slot_mapping=slot_mapping,
            query_starts=self._starts[: rows + 1],
            context_lens=self._context_lens[:rows],
            block_tables=self._block_tables[:rows],
            num_decodes=rows,
            max_query_len=1,
            max_context_len=self._max_model_len,
        )
        logits = self._model.logits(self._model.forward(batch, self._kv))
        tokens = self._executor.sampler.choose(logits, slots, positions + 1)
        last_token[slots] = tokens.clamp(min=0)
        return logits, tokens
