"""The one comparison of kernel tests: the error's length over the reference's, by dtype."""

import torch
from torch import Tensor

RATIO = {
    torch.float32: 1e-5,  # sums in another order
    torch.float16: 2e-3,  # 11 bits: half a unit in the last place is 5e-4, two or three roundings in a row
    torch.bfloat16: 1e-2,  # 8 bits: 4e-3 for each rounding
    torch.float8_e4m3fn: 5e-2,  # 4 bits: 2.6e-2 on average for each rounding, of the input and of the hidden
}


def assert_close(name: str, out: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Fail unless `out` is finite, shaped as expected, and near it for `dtype` (default: its own)."""
    assert out.shape == expected.shape, f"{name}: {tuple(out.shape)}, expected {tuple(expected.shape)}"
    wide, reference = out.double(), expected.double()
    assert bool(wide.isfinite().all()), f"{name}: {int((~wide.isfinite()).sum())} of {out.numel()} not finite"
    allowed = RATIO[out.dtype if dtype is None else dtype]
    ratio = float((wide - reference).norm() / reference.norm().clamp(min=1e-30))
    assert ratio <= allowed, f"{name}: error ratio {ratio:.2e}, allowed {allowed:.0e}"
