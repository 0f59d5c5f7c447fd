"""Launch choices found by measuring: kernels look theirs up by card, number type and shape.

`headrace bench tune` writes the table (kernels/tuned.json). A card or a shape that is not in it gets what the kernel's
own rule says. Knows no kernel.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TABLE = Path(__file__).with_name("tuned.json")

Choices = Mapping[str, Mapping[str, Any]]  # by entry, of one card


def entry(kernel: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Name of a choice in the table."""
    return f"{kernel} {str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"


def read_table(path: Path = TABLE) -> Mapping[str, Choices]:
    """The choices of each card, by its name."""
    table: Mapping[str, Choices] = json.loads(path.read_text(encoding="utf-8"))
    return table


def tuned(kernel: str, x: Tensor, shape: tuple[int, ...]) -> Mapping[str, Any] | None:
    """The measured choice for this kernel at this shape on x's card; None = there is none."""
    return _found(kernel, x.dtype, shape, x.device) if x.is_cuda else None


@cache
def _found(
    kernel: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> Mapping[str, Any] | None:
    card = read_table().get(torch.cuda.get_device_name(device), {})
    return card.get(entry(kernel, dtype, shape))
