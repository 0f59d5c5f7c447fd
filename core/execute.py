"""The third verb of a step: run the model over the prepared inputs and sample, without waiting for the device.

Owns the KV tensor, the last token of each slot and the sampler. What may not be added here: anything that knows
requests' lifetimes, queues or the wire; anything that makes the host wait for the device.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.launched import Launched
from headrace.core.models.base import Model
from headrace.core.prepare import StepInputs
from headrace.core.request import Request
from headrace.core.sampler import Sampled, Sampler


class StepGraphs(Protocol):
    """Recorded steps. Implemented by core/graphs.py."""

    def fits(self, inputs: StepInputs) -> bool:
        """Whether a recorded step can stand in for these inputs."""
        ...

    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Replay one. Returns logits [S, V] and tokens [S], valid until the next replay."""
        ...


class Executor:
    """Runs steps of one model over one KV pool.

    Args:
        model: loaded, on its device.
        kv: the pool, shaped `model.kv_shape(num_blocks, block_size)`.
        max_num_seqs: number of slots; one more is kept for the padded rows of graphs.
    """

    def __init__(self, model: Model, kv: Tensor, max_num_seqs: int) -> None:
        self._model = model
        self._kv = kv
        one, two = model.kv_shape(1, 1), model.kv_shape(2, 1)
        self._block_axis = next(axis for axis, size in enumerate(one) if size != two[axis])
        self.sampler = Sampler(max_num_seqs + 1, model.spec.vocab_size, kv.device)
        self.last_token = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=kv.device)
        self._graphs: StepGraphs | None = None

    def use_graphs(self, graphs: StepGraphs) -> None:
        """Replay recorded steps from now on, where they fit."""
        self._graphs = graphs

    def enter(self, request: Request) -> None:
        """A request got its slot: load what the device must know of it."""
        self.sampler.enter(request.slot, request)

    @torch.inference_mode()
    def execute(self, inputs: StepInputs) -> Launched:
        """Queue the step's work on the device."""
        if inputs.copies:
            self._copy_blocks(inputs.copies)
        slot_list: list[int] = inputs.sample_slots.tolist()
        if self._graphs is not None and self._graphs.fits(inputs):
            logits, tokens = self._graphs.run(inputs)
            if self.sampler.is_plain(slot_list):
                return Launched(Sampled(tokens, None))
            # The recorded step chose by the plain rules; these rows have more.
            logits = logits.clone()
        else:
            hidden = self._model.forward(self._batch(inputs), self._kv)
            if not slot_list:
                return Launched(None)
            logits = self._model.logits(hidden[self._send(inputs.sample_at)])
        slots = self._send(inputs.sample_slots)
        sampled = self.sampler.sample(logits, slots, slot_list, self._send(inputs.sample_positions))
        self.last_token[slots] = sampled.tokens.clamp(min=0)
        return Launched(sampled)

    def _batch(self, inputs: StepInputs) -> Batch:
        token_ids = self._send(inputs.token_ids)
        if inputs.unknown_at.size:
            token_ids[self._send(inputs.unknown_at)] = self.last_token[self._send(inputs.unknown_slots)]
        return Batch(
            token_ids=token_ids,
            positions=self._send(inputs.positions),
            slot_mapping=self._send(inputs.slot_mapping),
            query_starts=self._send(inputs.query_starts),
            context_lens=self._send(inputs.context_lens),
            block_tables=self._send(inputs.block_tables),
            num_decodes=inputs.num_decodes,
            max_query_len=inputs.max_query_len,
            max_context_len=inputs.max_context_len,
            prefill_context=int(inputs.context_lens[inputs.num_decodes :].sum()),
        )

    def _send(self, array: NDArray[np.integer]) -> Tensor:
        tensor = torch.from_numpy(array)
        device = self._kv.device
        # From pinned memory the copy does not wait; torch keeps the pages until it is done.
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    def _copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        pairs = self._send(np.array(copies, np.int64))
        moved = self._kv.index_select(self._block_axis, pairs[:, 0])
        self._kv.index_copy_(self._block_axis, pairs[:, 1], moved)
