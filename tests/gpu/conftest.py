"""Tests of the engine on a card. Without one they are skipped; `pytest -m gpu` runs them."""

from pathlib import Path

import pytest
import torch

from headrace.core.models.base import Model
from tests.gpu.models import FAMILIES, load, save


@pytest.fixture(autouse=True, scope="session")
def card() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA card")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved random checkpoint of each family."""
    found = {}
    for name in FAMILIES:
        found[name] = tmp_path_factory.mktemp(name)
        save(name, found[name])
    return found


@pytest.fixture(scope="session")
def models(folders: dict[str, Path]) -> dict[str, Model]:
    """Each family in bfloat16, as a card serves it."""
    return {name: load(path, torch.bfloat16) for name, path in folders.items()}
