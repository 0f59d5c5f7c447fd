"""MLA as a whole, its long rows expanded or a few tokens merged, against the latent form computed plainly."""

import pytest
import torch

from headrace.kernels.mla_attend import MlaUp, mla_attend_expanded, mla_attend_few, mla_attend_ref
from headrace.kernels.paged_plan import SHORT_QUERY
from tests.kernels.close import assert_close
from tests.kernels.paged import ragged_plan
from tests.kernels.shapes import poison_unused, rotations


def check(
    query_lens: list[int],
    context_lens: list[int],
    num_short: int,
    dtype: torch.dtype,
    interleaved: bool,
    *shape: int,
    device: torch.device,
) -> None:
    """`shape`: heads, without position, rotary, latent, values."""
    heads, nope, turning, rank, value = shape
    plan, blocks = ragged_plan(query_lens, context_lens, device, num_short=num_short)
    tokens = sum(query_lens)
    q = torch.randn(tokens, heads, nope + turning, dtype=dtype, device=device)
    cache = torch.randn(blocks, 16, rank + turning, dtype=dtype, device=device)
    poison_unused(cache, plan, block_axis=0)
    both = torch.randn(heads, nope + value, rank, dtype=dtype, device=device) * rank**-0.5
    up = MlaUp(
        key=both[:, :nope].contiguous(),
        value=both[:, nope:].transpose(1, 2).contiguous(),
        both=both.flatten(0, 1),
    )
    rotation = rotations(tokens, turning // 2, device)
    scale = (nope + turning) ** -0.5
    attend = mla_attend_expanded if max(query_lens) > SHORT_QUERY else mla_attend_few
    out = attend(q, cache, up, rotation, plan, scale, interleaved)
    wide = MlaUp(up.key.float(), up.value.float(), up.both.float())
    expected = mla_attend_ref(q.float(), cache.float(), wide, rotation, plan, scale, interleaved)
    # Keys and values are rounded once more than in the latent form.
    assert_close("values", out.float(), expected, dtype=dtype)


@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_interpreted(dtype: torch.dtype, interleaved: bool, device: torch.device) -> None:
    check([3, 1, 40, 17], [9, 30, 70, 17], 2, dtype, interleaved, 2, 32, 16, 64, 32, device=device)
    check([1, 0, 3, 1], [300, 1, 70, 5], 0, dtype, interleaved, 2, 32, 16, 64, 32, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_on_the_card(dtype: torch.dtype, interleaved: bool) -> None:
    device = torch.device("cuda")
    check(
        [1, 4, 0, 2, 129, 63, 7],
        [300, 5, 1, 77, 129, 400, 1000],
        4,
        dtype,
        interleaved,
        16,
        128,
        64,
        512,
        128,
        device=device,
    )
    check([1000], [1000], 0, dtype, interleaved, 16, 128, 64, 512, 128, device=device)
    check([1], [445], 0, dtype, interleaved, 16, 128, 64, 512, 128, device=device)
    check([1, 4, 0, 1], [1000, 63, 1, 7], 0, dtype, interleaved, 16, 128, 64, 512, 128, device=device)
