"""`headrace models`: what a server has, or what is in a model folder.

Reads config.json and the headers of safetensors files; no tensor, so it needs no torch.
"""

import asyncio
import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace.config import ConfigError
from headrace.gateway.client import Client

MAX_HEADER_BYTES = 100 << 20  # as the safetensors library has it
_FIELDS = {
    "hidden_size": "hidden size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "attention heads",
    "kv_lora_rank": "KV latent",
    "n_routed_experts": "experts",
    "num_experts": "experts",
    "num_experts_per_tok": "experts per token",
    "n_shared_experts": "shared experts",
    "num_nextn_predict_layers": "MTP modules",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "context",
}


def describe_folder(folder: Path) -> Table:
    """A table of a Hugging Face folder's architecture and weights.

    Raises:
        ConfigError: it is no model folder, or a file in it cannot be read.
    """
    config = _read_json(folder / "config.json")
    table = Table("", "", show_header=False, box=None, title=str(folder), title_justify="left")
    table.add_row("architecture", ", ".join(config.get("architectures") or ()) or "not named")
    table.add_row("type", str(config.get("model_type", "not named")))
    for field, label in _FIELDS.items():
        if config.get(field) is not None:
            table.add_row(
                label, f"{config[field]:,}" if isinstance(config[field], int) else str(config[field])
            )
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        blocks = quantization.get("weight_block_size")
        method = str(quantization.get("quant_method", "unknown"))
        table.add_row("quantization", f"{method}, blocks of {blocks}" if blocks else method)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        table.add_row("weights", "none (only --load-format dummy can serve it)")
        return table
    values: Counter[str] = Counter()
    for path in files:
        values += _count_values(path)
    size = sum(path.stat().st_size for path in files)
    table.add_row("weights", f"{sum(values.values()):,} values, {size:,} bytes in {len(files)} file(s)")
    for dtype, count in values.most_common():
        table.add_row("", f"{dtype}: {count:,}")
    return table


def list_served(url: str, api_key: str) -> Table:
    """A table of the models of a running server.

    Raises:
        ClientError: it does not answer.
    """
    answer = asyncio.run(_ask(url, api_key))
    table = Table("model", "context", box=None, title=url, title_justify="left")
    for entry in answer["data"]:
        length = entry.get("max_model_len")
        table.add_row(str(entry["id"]), f"{length:,}" if length else "unknown")
    return table


async def _ask(url: str, api_key: str) -> Any:
    client = Client(url, api_key)
    try:
        return await client.get_json("/v1/models")
    finally:
        await client.close()


def _count_values(path: Path) -> Counter[str]:
    """Values per dtype, from the header alone: 8 bytes of length, then JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= MAX_HEADER_BYTES:
                raise ConfigError(f"{path} is not a safetensors file")
            header = json.loads(file.read(length))
        counts: Counter[str] = Counter()
        for name, entry in header.items():
            if name != "__metadata__":
                counts[str(entry["dtype"])] += prod(entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from error
    return counts


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content
