"""Recorded forward passes of steps that hold prompts: one CUDA graph for some numbers of query tokens.

A prompt of a few hundred tokens costs the card less time than the host needs to launch its kernels. Owns the graphs
and their static inputs. Knows no request and samples nothing. Built by core/build.py on a card, used by execute.py.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.execute import Executor
from headrace.core.model_spec import MlaSpec
from headrace.core.models.base import Model
from headrace.core.prepare import StepInputs
from headrace.kernels.paged_plan import ShortRows

STAGES = 2  # one is being filled while the copy out of the other may still be under way
LONG_ROWS = 32  # prompts of a step
# From here on the card takes longer than the host, so steps are launched one kernel after the other.
LARGEST = 4096
SIZES = (
    32,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    640,
    768,
    1024,
    1280,
    1536,
    1792,
    2048,
    2560,
    3072,
    3584,
    LARGEST,
)
CACHED = 8192  # positions of earlier chunks and cached prefixes that a recorded step can attend to


def prompt_graph_sizes(max_num_batched_tokens: int) -> list[int]:
    """Numbers of query tokens worth a graph."""
    return [size for size in SIZES if size <= max_num_batched_tokens] or [SIZES[0]]


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Static inputs, on the device or pinned on the host.

    R rows: those of one token, each in a place of its own; the prompts; a last one that owns the padding, over the
    pool's block 0. Rows that a step does not have are empty.
    """

    longs: Tensor  # [5 * size] int64: token ids, positions, slot mapping, slots, 1 where the device knows the token
    rows: Tensor  # [2 * R + 1] int32: query starts [R + 1], context lengths [R]
    tables: Tensor  # [R, B] int32


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor  # [size, D]


class PromptGraphs:
    """Implements execute.py's ForwardGraphs.

    The graphs share one memory pool, so they are recorded largest first, and the output of a replay lasts until
    the next one.

    Args:
        executor: whose last tokens are read; it must outlive this.
        model: the executor's.
        kv: the executor's.
        max_num_seqs: slots: most rows of one token.
        max_model_len: positions of the longest request.
        block_size: tokens of a block.
        sizes: numbers of query tokens, ascending.
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
        sizes: Sequence[int],
    ) -> None:
        self._executor = executor
        self._model = model
        self._kv = kv
        self._singles = max_num_seqs
        self._num_rows = max_num_seqs + LONG_ROWS + 1
        self._sizes = list(sizes)
        width = -(-max_model_len // block_size)
        self._device_inputs = self._allocate(width, kv.device)
        self._stages = [self._allocate(width, None) for _ in range(STAGES)]
        self._sent = [torch.cuda.Event() for _ in range(STAGES)]
        self._turn = 0
        self._recorded = self._record()

    def fits(self, inputs: StepInputs) -> bool:
        """See ForwardGraphs."""
        return self._key(inputs) is not None

    def run(self, inputs: StepInputs) -> Tensor:
        """See ForwardGraphs."""
        key = self._key(inputs)
        assert key is not None, "no recorded step fits"
        size, _ = key
        stage, device = self._stages[self._turn], self._device_inputs
        self._sent[self._turn].synchronize()
        self._fill(stage, inputs, size)
        device.longs[: 5 * size].copy_(stage.longs[: 5 * size], non_blocking=True)
        device.rows.copy_(stage.rows, non_blocking=True)
        prompts = self._singles + len(inputs.context_lens) - inputs.num_decodes
        for first, end in ((0, inputs.num_decodes), (self._singles, prompts)):
            device.tables[first:end].copy_(stage.tables[first:end], non_blocking=True)
        self._sent[self._turn].record()
        self._turn = (self._turn + 1) % STAGES
        recorded = self._recorded[key]
        recorded.graph.replay()
        return recorded.hidden

    def _key(self, inputs: StepInputs) -> tuple[int, int] | None:
        """(size, positions of the prompts' contexts) of the smallest recorded step that these inputs fit."""
        tokens, singles = inputs.num_tokens, inputs.num_decodes
        if inputs.short is not None or inputs.ahead or tokens > self._sizes[-1] or singles > self._singles:
            return None
        if not 0 < len(inputs.context_lens) - singles <= LONG_ROWS:
            return None
        size = self._sizes[bisect.bisect_left(self._sizes, tokens)]
        needed = int(inputs.context_lens[singles:].sum()) + size - tokens
        return next(((size, most) for most in self._contexts(size) if needed <= most), None)

    def _contexts(self, size: int) -> tuple[int, ...]:
        """Positions that recorded steps of this size can attend to. What MLA expands costs time by the position."""
        narrow = isinstance(self._model.spec.attention, MlaSpec)
        return (size, size + CACHED) if narrow else (size + CACHED,)

    def _allocate(self, width: int, device: torch.device | None) -> _Inputs:
        pinned = device is None
        longs = torch.zeros(5 * self._sizes[-1], dtype=torch.int64, device=device, pin_memory=pinned)
        rows = torch.zeros(2 * self._num_rows + 1, dtype=torch.int32, device=device, pin_memory=pinned)
        tables = torch.zeros(self._num_rows, width, dtype=torch.int32, device=device, pin_memory=pinned)
        return _Inputs(longs, rows, tables)

    def _fill(self, stage: _Inputs, inputs: StepInputs, size: int) -> None:
        tokens, singles, first = inputs.num_tokens, inputs.num_decodes, self._singles
        end = first + len(inputs.context_lens) - singles
        longs = stage.longs.numpy()[: 5 * size].reshape(5, size)
        longs[:, tokens:] = 0
        for row, values in enumerate((inputs.token_ids, inputs.positions, inputs.slot_mapping)):
            longs[row, :tokens] = values
        longs[3:, :tokens] = 0
        longs[3, inputs.unknown_at] = inputs.unknown_slots
        longs[4, inputs.unknown_at] = 1
        starts, lengths = np.split(stage.rows.numpy(), [self._num_rows + 1])
        starts[:singles] = inputs.query_starts[:singles]
        starts[singles:first] = singles
        starts[first : end + 1] = inputs.query_starts[singles:]
        starts[end + 1 : -1] = tokens
        starts[-1] = size
        lengths[:singles] = inputs.context_lens[:singles]
        # An empty row attends to a position all the same, for no query.
        lengths[singles:first] = 1
        lengths[first:end] = inputs.context_lens[singles:]
        lengths[end:-1] = 0
        lengths[-1] = size - tokens
        tables, width = stage.tables.numpy(), inputs.block_tables.shape[1]
        tables[:singles, :width] = inputs.block_tables[:singles]
        tables[first:end, :width] = inputs.block_tables[singles:]

    @torch.inference_mode()
    def _record(self) -> dict[tuple[int, int], _Recorded]:
        memory = torch.cuda.graph_pool_handle()
        recorded: dict[tuple[int, int], _Recorded] = {}
        for size in reversed(self._sizes):
            # All padding: what is recorded must also run as it is.
            self._device_inputs.rows.zero_()
            self._device_inputs.rows[self._num_rows] = size
            self._device_inputs.rows[-1] = size
            for positions in self._contexts(size):
                self._forward(size, positions)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory):
                    hidden = self._forward(size, positions)
                recorded[size, positions] = _Recorded(graph, hidden)
        return recorded

    def _forward(self, size: int, positions: int) -> Tensor:
        """What is recorded: the model's pass, with the unknown tokens looked up by slot."""
        longs = self._device_inputs.longs[: 5 * size].view(5, size)
        given, at, slot_mapping, slots, unknown = longs.unbind(0)
        batch = Batch(
            token_ids=torch.where(unknown > 0, self._executor.last_token[slots], given),
            positions=at,
            slot_mapping=slot_mapping,
            query_starts=self._device_inputs.rows[: self._num_rows + 1],
            context_lens=self._device_inputs.rows[self._num_rows + 1 :],
            block_tables=self._device_inputs.tables,
            num_decodes=self._singles,
            max_query_len=size,
            max_context_len=positions,
            prefill_context=positions,
            short=ShortRows(self._singles, min(self._singles, size), 1),
        )
        return self._model.forward(batch, self._kv)
