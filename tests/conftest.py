"""Fixtures that every room's tests may use, and Triton's interpreter where no card is."""

import os
from pathlib import Path

import pytest
import torch

from headrace.config import embedded_model

# Read by triton.jit when a kernel's module is imported, be it by a test of another room.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def embedded_path() -> Path:
    """Folder of the model that comes with the package."""
    return embedded_model()


@pytest.fixture(scope="session")
def small_path() -> Path:
    """Folder of the 2.4M-parameter relative of the embedded model: quick, not clever."""
    return Path(__file__).parent / "fixtures" / "small"
