"""The third verb of a step: run the model over the prepared inputs and sample, without waiting for the device.

Owns the KV tensor, the last token of each slot and the sampler. What may not be added here: anything that knows
requests' lifetimes, queues or the wire; anything that makes the host wait for the device.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.launched import Launched
from headrace.core.models.base import Model
from headrace.core.mtp_drafter import Drafted, DraftRows, MtpDrafter
from headrace.core.prepare import DraftInputs, StepInputs
from headrace.core.request import Request
from headrace.core.sampler import Drafts, Sampled, Sampler

MANY_UNUSED = 256  # query tokens that do not sample, from which it pays to leave them out of the last layer


class StepGraphs(Protocol):
    """Recorded steps. Implemented by core/graphs.py."""

    def fits(self, inputs: StepInputs) -> bool:
        """Whether a recorded step can stand in for these inputs."""
        ...

    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Replay one. Returns logits [S, V] and tokens [S], valid until the next replay."""
        ...


class DraftGraphs(Protocol):
    """Recorded steps with drafts. Implemented by core/draft_graphs.py."""

    def fits(self, inputs: StepInputs) -> bool:
        """Whether a recorded step can stand in for these inputs."""
        ...

    def run(self, inputs: StepInputs) -> "Verifiable":
        """Replay the model and the verification."""
        ...

    def draft(self, inputs: StepInputs, *, greedy: bool) -> Drafted:
        """Replay what drafts behind it."""
        ...


@dataclass(frozen=True, slots=True)
class Verifiable:
    """What a recorded verification left, until the next replay."""

    logits: Tensor  # [T, V], gone once drafted
    tokens: Tensor  # [T] int64, chosen by the plain rules; may be overwritten before `draft`
    accepted: Tensor  # [R] int64; likewise


class ForwardGraphs(Protocol):
    """Recorded passes of the model alone. Implemented by core/prompt_graphs.py."""

    def fits(self, inputs: StepInputs) -> bool:
        """Whether a recorded pass can stand in for these inputs."""
        ...

    def run(self, inputs: StepInputs) -> Tensor:
        """Replay one. Returns hidden states [T or more, D], valid until the next replay."""
        ...


class Executor:
    """Runs steps of one model over one KV pool.

    Args:
        model: loaded, on its device.
        kv: the pool, shaped `model.kv_shape(num_blocks, block_size)`.
        max_num_seqs: number of slots; one more is kept for the padded rows of graphs.
        exact: see Sampler.
    """

    def __init__(self, model: Model, kv: Tensor, max_num_seqs: int, *, exact: bool = False) -> None:
        self._model = model
        self._kv = kv
        one, two = model.kv_shape(1, 1), model.kv_shape(2, 1)
        self._block_axis = next(axis for axis, size in enumerate(one) if size != two[axis])
        self.sampler = Sampler(max_num_seqs + 1, model.spec.vocab_size, kv.device, exact=exact)
        self.last_token = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=kv.device)
        self._graphs: StepGraphs | None = None
        self._prompt_graphs: ForwardGraphs | None = None
        self._draft_graphs: DraftGraphs | None = None
        self._drafter: MtpDrafter | None = None

    def use_graphs(self, graphs: StepGraphs) -> None:
        """Replay recorded steps from now on, where they fit."""
        self._graphs = graphs

    def use_prompt_graphs(self, graphs: ForwardGraphs) -> None:
        """The same for steps that hold prompts."""
        self._prompt_graphs = graphs

    def use_draft_graphs(self, graphs: DraftGraphs | None) -> None:
        """The same for steps of decodes that verify drafts or make new ones."""
        self._draft_graphs = graphs

    @property
    def drafter(self) -> MtpDrafter | None:
        """Who drafts behind the steps."""
        return self._drafter

    def use_drafter(self, drafter: MtpDrafter) -> None:
        """Steps may draft ahead from now on; the pool has the drafter's layers."""
        self._drafter = drafter

    def enter(self, request: Request) -> None:
        """A request got its slot: load what the device must know of it."""
        self.sampler.enter(request.slot, request)

    @torch.inference_mode()
    def execute(self, inputs: StepInputs) -> Launched:
        """Queue the step's work on the device."""
        if inputs.copies:
            self._copy_blocks(inputs.copies)
        slot_list: list[int] = inputs.sample_slots.tolist()
        if inputs.drafts is not None or inputs.ahead:
            if self._draft_graphs is not None and self._draft_graphs.fits(inputs):
                return self._verify_recorded(self._draft_graphs, inputs, slot_list)
        elif self._graphs is not None and self._graphs.fits(inputs):
            logits, tokens = self._graphs.run(inputs)
            if self.sampler.is_plain(slot_list):
                return Launched(Sampled(tokens, None))
            # The recorded step chose by the plain rules; these rows have more.
            return Launched(self._sample(logits.clone(), inputs, slot_list))
        if self._prompt_graphs is not None and self._prompt_graphs.fits(inputs):
            hidden = self._prompt_graphs.run(inputs)[: inputs.num_tokens]
            batch = self._batch(inputs) if inputs.ahead else None
        elif not inputs.ahead and inputs.num_tokens >= len(slot_list) + MANY_UNUSED:
            return Launched(self._choose_alone(inputs, slot_list))
        else:
            batch = self._batch(inputs)
            hidden = self._model.forward(batch, self._kv)
        sampled = self._choose(hidden, inputs, slot_list)
        drafted = None
        if inputs.ahead and batch is not None:
            drafted = self._draft(batch, hidden, inputs, sampled)
        return Launched(sampled, drafted)

    def _choose_alone(self, inputs: StepInputs, slot_list: list[int]) -> Sampled | None:
        """Of a step most of whose positions do not sample: the last layer spares itself those."""
        rows = inputs.sample_at if slot_list else np.zeros(1, np.int64)
        hidden = self._model.forward_rows(self._batch(inputs), self._kv, self._send(rows))
        return self._sample(self._model.logits(hidden), inputs, slot_list) if slot_list else None

    def _verify_recorded(self, graphs: DraftGraphs, inputs: StepInputs, slot_list: list[int]) -> Launched:
        found = graphs.run(inputs)
        sampled = Sampled(found.tokens, None, found.accepted)
        if not self.sampler.is_plain(slot_list):
            # The recorded step chose by the plain rules; these rows have more.
            sampled = self._sample(found.logits.clone(), inputs, slot_list)
            found.tokens.copy_(sampled.tokens)
            if sampled.accepted is not None:
                found.accepted.copy_(sampled.accepted)
        drafted = graphs.draft(inputs, greedy=self.sampler.draws_none(slot_list)) if inputs.ahead else None
        return Launched(sampled, drafted)

    def _choose(self, hidden: Tensor, inputs: StepInputs, slot_list: list[int]) -> Sampled | None:
        if not slot_list:
            return None
        return self._sample(self._model.logits(hidden[self._send(inputs.sample_at)]), inputs, slot_list)

    def _sample(self, logits: Tensor, inputs: StepInputs, slot_list: list[int]) -> Sampled:
        slots, positions = self._send(inputs.sample_slots), self._send(inputs.sample_positions)
        if inputs.drafts is not None:
            return self.sampler.verify(
                logits, slots, slot_list, positions, self._drafts(inputs.drafts, slots)
            )
        sampled = self.sampler.sample(logits, slots, slot_list, positions)
        self.last_token[slots] = sampled.tokens.clamp(min=0)
        return sampled

    def _drafts(self, drafts: DraftInputs, slots: Tensor) -> Drafts:
        depths, probs, probs_at = self._send(drafts.depths), None, None
        if self._drafter is not None and drafts.sampled.any():
            probs = self._drafter.probs
            probs_at = self._drafter.probs_at(slots, depths, self._send(drafts.sampled))
        return Drafts(self._send(drafts.starts), self._send(drafts.tokens), probs, probs_at, depths)

    def _draft(
        self, batch: Batch, hidden: Tensor, inputs: StepInputs, sampled: Sampled | None
    ) -> Drafted | None:
        """Let the model's drafter follow the step, and draft behind the rows that sampled."""
        assert self._drafter is not None and inputs.next_ids is not None, "nobody drafts here"
        next_ids = self._send(inputs.next_ids)
        if sampled is None:
            self._drafter.absorb(batch, hidden, next_ids)
            return None
        last = sample_at = self._send(inputs.sample_at)
        next_ids[sample_at] = sampled.tokens.clamp(min=0)
        slots = inputs.sample_slots
        if inputs.drafts is not None and sampled.accepted is not None:
            slots = slots[inputs.drafts.starts[:-1]]
            last = sample_at[self._send(inputs.drafts.starts[:-1]) + sampled.accepted]
        absorbed = self._drafter.absorb(batch, hidden, next_ids)
        rows = DraftRows(
            last=last,
            positions=batch.positions[last],
            slots=self._send(slots),
            block_tables=batch.block_tables[self._send(inputs.sample_rows)],
        )
        greedy = self.sampler.draws_none(slots.tolist())
        return self._drafter.draft(absorbed[last], rows, inputs.ahead, greedy=greedy)

    def _batch(self, inputs: StepInputs) -> Batch:
        token_ids = self._send(inputs.token_ids)
        if inputs.unknown_at.size:
            token_ids[self._send(inputs.unknown_at)] = self.last_token[self._send(inputs.unknown_slots)]
        num_short = inputs.num_decodes if inputs.short is None else inputs.short.count
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
            prefill_context=int(inputs.context_lens[num_short:].sum()),
            short=inputs.short,
        )

    def _send(self, array: NDArray[np.integer] | NDArray[np.bool_]) -> Tensor:
        tensor = torch.from_numpy(array)
        device = self._kv.device
        # From pinned memory the copy does not wait; torch keeps the pages until it is done.
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    def _copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        pairs = self._send(np.array(copies, np.int64))
        moved = self._kv.index_select(self._block_axis, pairs[:, 0])
        self._kv.index_copy_(self._block_axis, pairs[:, 1], moved)
