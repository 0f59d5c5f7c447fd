"""Loads a model: config, check of every tensor's presence and shape, then the weights themselves.

Called by the engine process at start. No pickle and no code from the folder is ever run.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from headrace.config import LoadFormat, Quantization
from headrace.core.dummy import DummySource
from headrace.core.hf_config import read_spec
from headrace.core.model_spec import ModelSpec
from headrace.core.models.base import Model
from headrace.core.models.decoder import build_decoder
from headrace.core.safetensors_index import (
    Checkpoint,
    CheckpointError,
    TensorInfo,
    digest_files,
    open_checkpoint,
)
from headrace.core.tensor_source import Fp8Storage, Recorder
from headrace.kernels.fp8_block import BLOCK, Fp8Weight, fp8_block_dequantize, fp8_weight

Progress = Callable[[int, int], None]  # bytes read, bytes in all

SCALE_SUFFIX = "_scale_inv"
FLOATS = ("F32", "BF16", "F16")
FP8 = "F8_E4M3"
NAMES_SHOWN = 8  # in an error
COPIES_SHARE = 1 / 16  # of a card's memory that wide copies of fp8 weights may take


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "safetensors",
    seed: int = 0,
    quantization: Quantization = "",
    keep_fp8: bool | None = None,
    progress: Progress | None = None,
) -> Model:
    """Build the model of a Hugging Face folder.

    Args:
        path: holds config.json, and the safetensors unless `load_format` is "dummy".
        dtype: of weights and hidden states; routers stay float32.
        seed: of dummy weights.
        quantization: "fp8" = round the weights of products to 128x128 blocks, tensor by tensor.
        keep_fp8: whether such weights, rounded or found so, stay fp8 in memory, or are widened to `dtype`;
            None = on a card, unless `dtype` is float32, which asks for more digits than the kernels' activations carry.
        progress: called as tensors arrive.

    Raises:
        ConfigError: among them UnsupportedModel and CheckpointError; the message names key or tensor.
    """
    spec = read_spec(path)
    keep = device.type == "cuda" and dtype.itemsize == 2 if keep_fp8 is None else keep_fp8
    storage = Fp8Storage(keep=keep, copies=keep and _affords_copies(spec, dtype, device))
    with torch.no_grad():
        if load_format == "dummy":
            dummy = DummySource(seed, dtype, device, quantization=quantization, storage=storage)
            return build_decoder(spec, dummy, device)
        with open_checkpoint(path) as checkpoint:
            spec = _with_present_mtp(spec, checkpoint.tensors)
            check_tensors(needed_shapes(spec), checkpoint.tensors, spec)
            source = CheckpointSource(
                checkpoint, dtype, device, quantize=quantization == "fp8", storage=storage, progress=progress
            )
            return build_decoder(spec, source, device)


def fingerprint(
    path: Path,
    *,
    dtype: torch.dtype,
    load_format: LoadFormat,
    seed: int = 0,
    quantization: Quantization = "",
) -> str:
    """32 hex digits that differ where the model's answers would: config, weights' headers and samples, formats."""
    digest = hashlib.sha256(f"{dtype} {load_format} {quantization}\n".encode())
    digest.update((path / "config.json").read_bytes())
    digest.update(f"seed {seed}".encode() if load_format == "dummy" else digest_files(path))
    return digest.hexdigest()[:32]


def needed_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor the model is built from: the builder itself tells."""
    return _recorded(spec).shapes


def _recorded(spec: ModelSpec) -> Recorder:
    recorder = Recorder()
    build_decoder(replace(spec, max_position=1), recorder, torch.device("meta"))
    return recorder


def _affords_copies(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the dense products, which are few beside the experts, may also lie wide in a card's memory."""
    if device.type != "cuda":
        return False
    total = torch.cuda.get_device_properties(device).total_memory
    return _recorded(spec).dense_numbers * dtype.itemsize <= total * COPIES_SHARE


def check_tensors(
    needed: Mapping[str, tuple[int, ...]], found: Mapping[str, TensorInfo], spec: ModelSpec
) -> None:
    """Raise CheckpointError that names what is missing, unexpected, misshaped or of a dtype we cannot read."""
    scales: dict[str, tuple[int, ...]] = {}
    for name in needed.keys() & found.keys():
        if found[name].dtype == FP8:
            scales[name + SCALE_SUFFIX] = tuple(-(-n // BLOCK) for n in found[name].shape)
    wanted = {**needed, **scales}
    problems = [
        ("missing", sorted(wanted.keys() - found.keys())),
        ("unexpected", sorted(n for n in found.keys() - wanted.keys() if not _ignored(n, spec))),
        (
            "misshaped",
            [
                f"{name} (expected {list(shape)}, found {list(found[name].shape)})"
                for name, shape in sorted(wanted.items())
                if name in found and found[name].shape != shape
            ],
        ),
        (
            "of an unsupported dtype",
            [
                f"{name} ({found[name].dtype})"
                for name in sorted(wanted.keys() & found.keys())
                if found[name].dtype not in FLOATS and not (found[name].dtype == FP8 and name in needed)
            ],
        ),
    ]
    lines = [f"{len(names)} tensors {what}: {_shown(names)}" for what, names in problems if names]
    if lines:
        raise CheckpointError("; ".join(lines))


class CheckpointSource:
    """Copies tensors out of the mapped files, converting on the way."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        *,
        quantize: bool,
        storage: Fp8Storage,
        progress: Progress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._quantize = quantize
        self._storage = storage
        self._progress = progress
        self._rounded: set[str] = set()
        self._total = sum(info.num_bytes for info in checkpoint.tensors.values())
        self._done = 0

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def product(self, names: tuple[str, ...], *shape: int, in_blocks: bool) -> Tensor | Fp8Weight:
        wide = [name for name in names if self._checkpoint.tensors[name].dtype != FP8]
        if in_blocks and self._storage.keep and (self._quantize or not wide):
            return self._storage.empty(*shape, dtype=self._dtype, device=self._device)
        if in_blocks and self._quantize:
            self._rounded.update(wide)
        return self.empty(*shape)

    def fill(self, name: str, target: Tensor | Fp8Weight) -> None:
        info = self._checkpoint.tensors[name]
        data = self._checkpoint.read(name)
        self._done += info.num_bytes
        if info.dtype == FP8:
            scale = self._checkpoint.read(name + SCALE_SUFFIX)
            self._done += self._checkpoint.tensors[name + SCALE_SUFFIX].num_bytes
            _fill_from_fp8(data, scale, target)
        elif isinstance(target, Fp8Weight):
            target.quantize_(data)
        elif name in self._rounded:
            target.copy_(fp8_weight(data.to(self._device)).dequantize(target.dtype))
        else:
            target.copy_(data)
        if self._progress is not None:
            self._progress(self._done, self._total)


def _fill_from_fp8(data: Tensor, scale: Tensor, target: Tensor | Fp8Weight) -> None:
    if isinstance(target, Fp8Weight):
        target.fill_(data, scale)
    else:
        scale_inv = scale.to(target.device, torch.float32)
        target.copy_(fp8_block_dequantize(data.to(target.device), scale_inv, target.dtype))


def _with_present_mtp(spec: ModelSpec, found: Mapping[str, TensorInfo]) -> ModelSpec:
    """Tools that re-save a checkpoint often drop the MTP modules and leave the config's count."""
    first = f"model.layers.{spec.num_layers}."
    return spec if any(name.startswith(first) for name in found) else replace(spec, num_mtp=0)


def _ignored(name: str, spec: ModelSpec) -> bool:
    """Copies of shared tensors, and tables that are computed."""
    if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tied_embeddings):
        return True
    prefixes = (f"model.layers.{spec.num_layers + i}." for i in range(spec.num_mtp))
    return any(name in (f"{p}embed_tokens.weight", f"{p}shared_head.head.weight") for p in prefixes)


def _shown(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
