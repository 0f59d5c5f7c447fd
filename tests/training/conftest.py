"""Makes the repository's top-level `training` importable without putting the root on the path.

On the path, the root's folder `kernels` would hide Hugging Face's package of that name.
"""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "training"


def _import_training() -> None:
    spec = importlib.util.spec_from_file_location(
        "training", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["training"] = module
    spec.loader.exec_module(module)


if "training" not in sys.modules:
    _import_training()
