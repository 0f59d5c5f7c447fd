"""The same decode by Hugging Face's `transformers`, on the same weights, threads and prompts.

Imported only when asked for: transformers is a test dependency.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.core.bench.workload import DecodeShape, StepTimes, draw_prompts, time_difference
from headrace.core.safetensors_index import open_checkpoint
from headrace.core.weights import FP8, SCALE_SUFFIX
from headrace.kernels.fp8_block import fp8_block_dequantize


def load_peer(path: Path) -> Any:
    """transformers' model of the folder in float32; fp8 blocks are dequantised first, as it wants a card for them."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - only this benchmark needs it

    with TemporaryDirectory() as name:
        folder = Path(name)
        config = json.loads((path / "config.json").read_text())
        config.pop("quantization_config", None)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(
            _dequantized(path, config["num_hidden_layers"]), folder / "model.safetensors", {"format": "pt"}
        )
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _dequantized(path: Path, num_layers: int) -> dict[str, Tensor]:
    """Every tensor of the main model in float32, under its own name."""
    tensors: dict[str, Tensor] = {}
    with open_checkpoint(path) as checkpoint:
        for name, info in checkpoint.tensors.items():
            if name.endswith(SCALE_SUFFIX) or name.startswith(f"model.layers.{num_layers}."):
                continue
            tensor = checkpoint.read(name)
            if info.dtype == FP8:
                tensor = fp8_block_dequantize(tensor, checkpoint.read(name + SCALE_SUFFIX), torch.float32)
            tensors[name] = tensor.float().contiguous()
    return tensors


@torch.inference_mode()
def peer_tokens(model: Any, prompt: Sequence[int], num_output: int) -> list[int]:
    """Greedy output ids of one prompt, exactly `num_output` of them."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_output,
        min_new_tokens=num_output,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def time_peer(model: Any, vocab_size: int, shape: DecodeShape, repeats: int, seed: int = 0) -> StepTimes:
    """Time one decode step at batch 1, by the method of `time_decode`."""

    def run(num_output: int, seed: int) -> None:
        (prompt,) = draw_prompts(1, shape, vocab_size, seed)
        peer_tokens(model, prompt, num_output)

    return time_difference(run, shape, repeats, seed)
