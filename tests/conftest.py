"""Fixtures that every room's tests may use."""

from pathlib import Path

import pytest

from headrace.config import embedded_model


@pytest.fixture(scope="session")
def embedded_path() -> Path:
    """Folder of the model that comes with the package."""
    return embedded_model()


@pytest.fixture(scope="session")
def small_path() -> Path:
    """Folder of the 2.4M-parameter relative of the embedded model: quick, not clever."""
    return Path(__file__).parent / "fixtures" / "small"
