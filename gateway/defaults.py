"""What a model's folder says about generating: sampling defaults and end tokens, from its JSON files.

The rules are vLLM's (`--generation-config auto`): the model's values stand in for those a request leaves out.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Of generation_config.json; neutral where it is silent."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None  # None = up to the context
    eos_ids: tuple[int, ...] = ()


def load_defaults(folder: Path, tokenizer_eos: int | None) -> GenerationDefaults:
    """Read generation_config.json, and config.json for the end tokens where the former names none.

    Args:
        folder: of the model.
        tokenizer_eos: id of the tokenizer's own end token; it ends a generation too.
    """
    generation = read_json(folder / "generation_config.json")
    config = read_json(folder / "config.json")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    listed = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if tokenizer_eos is not None:
        listed = [*listed, tokenizer_eos]
    return GenerationDefaults(
        temperature=_or(generation, "temperature", 1.0),
        top_p=_or(generation, "top_p", 1.0),
        top_k=max(0, int(_or(generation, "top_k", 0))),
        min_p=_or(generation, "min_p", 0.0),
        repetition_penalty=_or(generation, "repetition_penalty", 1.0),
        max_new_tokens=generation.get("max_new_tokens"),
        eos_ids=tuple(dict.fromkeys(listed)),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} where there is none."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_bytes())
    return content if isinstance(content, dict) else {}


def _or(values: Mapping[str, Any], name: str, default: float) -> float:
    value = values.get(name)
    return default if value is None else float(value)
