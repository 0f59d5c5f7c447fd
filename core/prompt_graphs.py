"""Recorded forward passes of steps that hold prompts: one CUDA graph for some numbers of query tokens.

A prompt of a few hundred tokens costs the card less time than the host needs to launch its kernels. Owns the graphs
and their static inputs. Knows no request and samples nothing. Built by core/build.py on a card, used by execute.py.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.capture import undisturbed
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
LARGEST_ALONE = 1024  # up to which a step without decodes gains from graphs that have no place for them
ALIGNMENT = 16  # numbers
CACHED = 8192  # positions of earlier chunks and cached prefixes that a recorded step can attend to


def prompt_graph_sizes(max_num_batched_tokens: int) -> list[int]:
    """Numbers of query tokens worth a graph; the largest step's among them, for under load most are that large."""
    most = min(max_num_batched_tokens, LARGEST)
    return [*(size for size in SIZES if size < most), most]


class _Key(NamedTuple):
    """What a recorded step has room for."""

    size: int  # query tokens
    singles: int  # rows of one token
    positions: int  # of the prompts' contexts


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Static inputs, on the device or pinned on the host.

    R rows: those of one token, each in a place of its own; the prompts; a last one that owns the padding, over the
    pool's block 0. Rows that a step does not have are empty. Steps without decodes have the last rows alone.
    """

    longs: Tensor  # [5 * size] int64: token ids, positions, slot mapping, slots, 1 where the device knows the token
    rows: Tensor  # int32: query starts [R + 1], and from an aligned place on context lengths [R]
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
        self._singles = _aligned(max_num_seqs)
        self._num_rows = self._singles + LONG_ROWS + 1
        self._lengths_at = _aligned(self._num_rows + 1)
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
        stage, device = self._stages[self._turn], self._device_inputs
        self._sent[self._turn].synchronize()
        self._fill(stage, inputs, key)
        device.longs[: 5 * key.size].copy_(stage.longs[: 5 * key.size], non_blocking=True)
        device.rows.copy_(stage.rows, non_blocking=True)
        prompts = self._singles + len(inputs.context_lens) - inputs.num_decodes
        for first, end in ((0, inputs.num_decodes), (self._singles, prompts)):
            device.tables[first:end].copy_(stage.tables[first:end], non_blocking=True)
        self._sent[self._turn].record()
        self._turn = (self._turn + 1) % STAGES
        recorded = self._recorded[key]
        recorded.graph.replay()
        return recorded.hidden

    def _key(self, inputs: StepInputs) -> _Key | None:
        """The smallest recorded step that these inputs fit."""
        tokens, singles = inputs.num_tokens, inputs.num_decodes
        if inputs.short is not None or tokens > self._sizes[-1] or singles > self._singles:
            return None
        if not 0 < len(inputs.context_lens) - singles <= LONG_ROWS:
            return None
        size = self._sizes[bisect.bisect_left(self._sizes, tokens)]
        needed = int(inputs.context_lens[singles:].sum()) + size - tokens
        return next(
            (key for key in self._keys(size) if needed <= key.positions and singles <= key.singles), None
        )

    def _keys(self, size: int) -> Sequence[_Key]:
        """What is recorded of a size, the cheapest first. What MLA expands costs time by the position."""
        keys = []
        mla = isinstance(self._model.spec.attention, MlaSpec)
        if size <= LARGEST_ALONE:
            keys.append(_Key(size, 0, size if mla else size + CACHED))
        if mla:
            keys.append(_Key(size, self._singles, size))
        return [*keys, _Key(size, self._singles, size + CACHED)]

    def _allocate(self, width: int, device: torch.device | None) -> _Inputs:
        pinned = device is None
        longs = torch.zeros(5 * self._sizes[-1], dtype=torch.int64, device=device, pin_memory=pinned)
        num_ints = self._lengths_at + self._num_rows
        rows = torch.zeros(num_ints, dtype=torch.int32, device=device, pin_memory=pinned)
        tables = torch.zeros(self._num_rows, width, dtype=torch.int32, device=device, pin_memory=pinned)
        return _Inputs(longs, rows, tables)

    def _fill(self, stage: _Inputs, inputs: StepInputs, key: _Key) -> None:
        size, tokens, singles, first = key.size, inputs.num_tokens, inputs.num_decodes, self._singles
        end = first + len(inputs.context_lens) - singles
        longs = stage.longs.numpy()[: 5 * size].reshape(5, size)
        longs[:, tokens:] = 0
        for row, values in enumerate((inputs.token_ids, inputs.positions, inputs.slot_mapping)):
            longs[row, :tokens] = values
        longs[3:, :tokens] = 0
        longs[3, inputs.unknown_at] = inputs.unknown_slots
        longs[4, inputs.unknown_at] = 1
        ints = stage.rows.numpy()
        starts, lengths = ints[: self._num_rows + 1], ints[self._lengths_at :]
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

    @undisturbed()
    @torch.inference_mode()
    def _record(self) -> dict[_Key, _Recorded]:
        memory = torch.cuda.graph_pool_handle()
        recorded: dict[_Key, _Recorded] = {}
        for size in reversed(self._sizes):
            # All padding: what is recorded must also run as it is.
            self._device_inputs.rows.zero_()
            self._device_inputs.rows[self._num_rows] = size
            self._device_inputs.rows[-1] = size
            for key in self._keys(size):
                self._forward(key)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory):
                    hidden = self._forward(key)
                recorded[key] = _Recorded(graph, hidden)
        return recorded

    def _forward(self, key: _Key) -> Tensor:
        """What is recorded: the model's pass, with the unknown tokens looked up by slot."""
        longs = self._device_inputs.longs[: 5 * key.size].view(5, key.size)
        given, at, slot_mapping, slots, unknown = longs.unbind(0)
        first = self._singles - key.singles
        batch = Batch(
            token_ids=torch.where(unknown > 0, self._executor.last_token[slots], given),
            positions=at,
            slot_mapping=slot_mapping,
            query_starts=self._device_inputs.rows[first : self._num_rows + 1],
            context_lens=self._device_inputs.rows[self._lengths_at + first :],
            block_tables=self._device_inputs.tables[first:],
            num_decodes=key.singles,
            max_query_len=key.size,
            max_context_len=key.positions,
            prefill_context=key.positions,
            short=ShortRows(key.singles, min(key.singles, key.size), 1),
        )
        return self._model.forward(batch, self._kv)


def _aligned(count: int) -> int:
    """Kernels have a variant for addresses that are no multiple of 16 bytes: none is wanted."""
    return -(-count // ALIGNMENT) * ALIGNMENT
