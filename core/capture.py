"""What must hold while a step is recorded. Used by the classes that record CUDA graphs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection meanwhile: an old graph or event that it destroys spoils the recording of a new one."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
