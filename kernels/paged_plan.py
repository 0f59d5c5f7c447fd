"""How the device kernels divide a step's rows: sizes that the host knows, nothing read back from the device.

The same for every replay of a captured step. Made by plan_attention; read by the kernels' launchers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SHORT_QUERY = 16  # rows of so few query tokens gain more from a split context than from large query tiles
_DEFAULT_SMS = 132  # where there is no card: under Triton's interpreter


@dataclass(frozen=True, slots=True)
class ShortRows:
    """The first rows of a step: those with few query tokens, ragged or not."""

    count: int
    tokens: int  # query tokens of all of them together
    longest: int  # query tokens of one, at most SHORT_QUERY


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Rows 0..num_short - 1 have at most `short_len` query tokens, the `num_long` others at most `long_len`."""

    num_short: int
    short_tokens: int  # query tokens of the short rows, where there are long ones too
    short_len: int
    num_long: int
    long_len: int
    capacity: int  # positions of the longest context that may come
    split_size: int | None  # positions of a split where results must not depend on batch-mates; None = free
    num_sms: int
    device: torch.device
    long_context: int  # positions of the long rows' contexts together; more will do
    long_starts: Tensor  # [num_long] int32: positions of the long rows before


def plan_paged(
    context_lens: Tensor,
    num_decodes: int,
    max_query_len: int,
    max_context_len: int,
    prefill_context: int | None,
    split_size: int | None,
    short: ShortRows | None,
) -> PagedPlan:
    """Divide the rows. A step whose rows are all short is one call, whatever its rows' lengths.

    Arguments as of `plan_attention`.
    """
    device, num_rows = context_lens.device, context_lens.shape[0]
    if max_query_len <= SHORT_QUERY:
        short = ShortRows(num_rows, num_rows * max_query_len, max_query_len)
    elif short is None:
        short = ShortRows(num_decodes, num_decodes, 1)
    assert short.longest <= SHORT_QUERY, f"{short.longest} query tokens are no short row"
    num_long = num_rows - short.count
    long = context_lens[short.count :]
    return PagedPlan(
        num_short=short.count,
        short_tokens=short.tokens,
        short_len=short.longest,
        num_long=num_long,
        long_len=max_query_len,
        capacity=max_context_len,
        split_size=split_size,
        num_sms=_num_sms(device),
        device=device,
        long_context=num_long * max_context_len if prefill_context is None else prefill_context,
        long_starts=(long.cumsum(0, dtype=torch.int32) - long) if num_long else long,
    )


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _DEFAULT_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
