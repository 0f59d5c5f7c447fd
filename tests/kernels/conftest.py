"""Kernel tests: outputs poisoned, random numbers repeatable."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(42)


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write is NaN, or a number no test expects."""

    def poisoning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poisoned(*args: Any, **kwargs: Any) -> Tensor:
            out = make(*args, **kwargs)
            if out.dtype.is_floating_point and out.element_size() > 1:
                return out.fill_(float("nan"))
            if out.dtype in {torch.int32, torch.int64}:
                return out.fill_(-123456)
            return out

        return poisoned

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))
