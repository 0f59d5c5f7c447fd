"""What all layers of one forward pass share. Made by the decoder and the MTP head from a Batch."""

from dataclasses import dataclass

from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.model_spec import MlaSpec, ModelSpec
from headrace.kernels.attention_plan import AttentionPlan, plan_attention


@dataclass(frozen=True, slots=True)
class Step:
    """Per-step inputs of the attention layers."""

    rotation: Tensor  # [T, 1, R / 2] complex64: cosine + i * sine at each token's position
    slots: Tensor  # [T] int64
    plan: AttentionPlan


def begin_step(batch: Batch, kv: Tensor, rope_table: Tensor, spec: ModelSpec) -> Step:
    """Look up the rotations and divide the rows, once for all layers."""
    block_size = kv.shape[2 if isinstance(spec.attention, MlaSpec) else 3]
    return Step(
        rotation=rope_table.index_select(0, batch.positions),
        slots=batch.slot_mapping,
        plan=plan_attention(
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            batch.num_decodes,
            block_size,
            batch.max_query_len,
            batch.max_context_len,
            batch.prefill_context,
            short=batch.short,
        ),
    )
