"""What crosses from `prepare` to the model: the tensors of one step. Legend in docs/architecture.md.

T query tokens, R rows (requests), B blocks of the longest table, S rows that sample.
"""

from dataclasses import dataclass

from torch import Tensor

from headrace.kernels.paged_plan import ShortRows


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one forward pass over the paged KV pool."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: block * block_size + offset where the token's KV goes
    query_starts: Tensor  # [R + 1] int32: row r owns query tokens query_starts[r]..query_starts[r + 1] - 1
    context_lens: Tensor  # [R] int32: KV length of the row, this step's tokens included
    block_tables: Tensor  # [R, B] int32, padded with 0
    num_decodes: int  # the first rows, with exactly one query token each
    max_query_len: int
    max_context_len: int
    prefill_context: int | None = None  # positions of the other rows' contexts together; None = not counted
    short: ShortRows | None = None  # the first rows, of at most SHORT_QUERY query tokens; None = the decodes
