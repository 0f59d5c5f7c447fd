"""The third verb of a step: run the model over the prepared inputs and sample, without waiting for the device.

Owns the KV tensor, the last token of each slot and the sampler. What may not be added here: anything that knows
requests' lifetimes, queues or the wire; anything that makes the host wait for the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.models.base import Model
from headrace.core.prepare import StepInputs
from headrace.core.request import Request
from headrace.core.sampler import Sampled, Sampler


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way. `sampled` is None where no row of the step sampled."""

    sampled: Sampled | None


class Executor:
    """Runs steps of one model over one KV pool.

    Args:
        model: loaded, on its device.
        kv: the pool, shaped `model.kv_shape(num_blocks, block_size)`.
        max_num_seqs: number of slots.
    """

    def __init__(self, model: Model, kv: Tensor, max_num_seqs: int) -> None:
        self._model = model
        self._kv = kv
        one, two = model.kv_shape(1, 1), model.kv_shape(2, 1)
        self._block_axis = next(axis for axis, size in enumerate(one) if size != two[axis])
        self._sampler = Sampler(max_num_seqs, model.spec.vocab_size, kv.device)
        self._last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=kv.device)

    def enter(self, request: Request) -> None:
        """A request got its slot: load what the device must know of it."""
        self._sampler.enter(request.slot, request)

    @torch.inference_mode()
    def execute(self, inputs: StepInputs) -> Launched:
        """Queue the step's work on the device."""
        if inputs.copies:
            self._copy_blocks(inputs.copies)
        batch = inputs.batch
        if inputs.unknown_at is not None and inputs.unknown_slots is not None:
            batch.token_ids[inputs.unknown_at] = self._last_token[inputs.unknown_slots]
        hidden = self._model.forward(batch, self._kv)
        if not inputs.sample_slot_list:
            return Launched(None)
        logits = self._model.logits(hidden[inputs.sample_at])
        sampled = self._sampler.sample(
            logits, inputs.sample_slots, inputs.sample_slot_list, inputs.sample_positions
        )
        self._last_token[inputs.sample_slots] = sampled.tokens.clamp(min=0)
        return Launched(sampled)

    def _copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        pairs = torch.tensor(copies, dtype=torch.int64, device=self._kv.device)
        moved = self._kv.index_select(self._block_axis, pairs[:, 0])
        self._kv.index_copy_(self._block_axis, pairs[:, 1], moved)
