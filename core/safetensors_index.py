"""The tensors of a checkpoint folder: where each stands, its dtype and shape, and its memory-mapped contents.

Reads safetensors headers itself, so that nothing is loaded to know what is there. Called by core/weights.py.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.config import ConfigError

INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20  # the format's own limit
SAMPLES, SAMPLE_BYTES = 16, 4096  # of each file's contents, for the fingerprint


class CheckpointError(ConfigError):
    """The folder's weights cannot be loaded; the message names file or tensor."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its file describes it."""

    file: Path
    dtype: str  # safetensors' name: BF16, F8_E4M3, ...
    shape: tuple[int, ...]
    num_bytes: int


class Checkpoint:
    """All tensors of one folder. Made by `open_checkpoint`."""

    def __init__(self, tensors: dict[str, TensorInfo], handles: dict[Path, Any]) -> None:
        self.tensors = tensors
        self._handles = handles

    def read(self, name: str) -> Tensor:
        """The tensor, mapped from its file: do not write to it, and copy what must outlive the checkpoint."""
        tensor: Tensor = self._handles[self.tensors[name].file].get_tensor(name)
        return tensor


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """Open every shard of the folder. Raises CheckpointError."""
    tensors = index_tensors(path)
    with ExitStack() as stack:
        try:
            handles = {
                file: stack.enter_context(safe_open(file, framework="pt"))
                for file in sorted({info.file for info in tensors.values()})
            }
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot open the weights in {path}: {error}") from error
        yield Checkpoint(tensors, handles)


def index_tensors(path: Path) -> dict[str, TensorInfo]:
    """Name -> where and what, from the headers alone. Raises CheckpointError."""
    tensors: dict[str, TensorInfo] = {}
    for file, expected in _shards(path).items():
        found = _read_header(file)
        for name in expected if expected is not None else found:
            if name not in found:
                raise CheckpointError(f"{INDEX_FILE} places {name} in {file.name}, which does not hold it")
            tensors[name] = found[name]
    return tensors


def digest_files(path: Path) -> bytes:
    """A digest of every shard's header, length, and samples of its contents: quick for any size."""
    digest = hashlib.sha256()
    for file in sorted(_shards(path)):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(min(8 + _header_bytes(stream.read(8), file), size)))
            for i in range(SAMPLES):
                stream.seek(size * i // SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.digest()


def _shards(path: Path) -> dict[Path, list[str] | None]:
    """File -> the names the index places in it; None = all that it holds."""
    index = path / INDEX_FILE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            placed = [(str(name), str(file)) for name, file in weight_map.items()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
        shards: dict[Path, list[str] | None] = {}
        for name, file in placed:
            if Path(file).name != file:
                raise CheckpointError(f"{index} places {name} outside the folder: {file!r}")
            names = shards.setdefault(path / file, [])
            assert names is not None
            names.append(name)
        return shards
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        raise CheckpointError(
            f"{path} has {len(files)} *.safetensors files and no {INDEX_FILE}; there must be one file or an index"
        )
    return {files[0]: None}


def _read_header(file: Path) -> dict[str, TensorInfo]:
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(_header_bytes(stream.read(8), file)))
        return {
            name: TensorInfo(
                file=file,
                dtype=str(entry["dtype"]),
                shape=tuple(int(n) for n in entry["shape"]),
                num_bytes=int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error!r}") from error


def _header_bytes(prefix: bytes, file: Path) -> int:
    size = int.from_bytes(prefix, "little")
    if len(prefix) != 8 or not 2 <= size <= MAX_HEADER_BYTES:
        raise CheckpointError(f"{file} is not a safetensors file: its header would have {size} bytes")
    return size
