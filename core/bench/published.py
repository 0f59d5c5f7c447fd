"""What others measured on the same card with the same shapes, to lay beside our own figures.

Taken apart from our runs, so only where card, shape, dtype and workload agree. Called by record.py.
"""

from dataclasses import dataclass

CARD = "NVIDIA H200"
PEER = (
    "vLLM 0.26.0, same card, measured apart"  # 2026-11-30, torch 2.11.0+cu130, its defaults, prefix cache off
)


@dataclass(frozen=True, slots=True)
class Workload:
    """What was measured. Prompt and output tokens are means of a request; a decode's output is its longer run's."""

    bench: str  # decode | prefill | mixed
    model: str  # name of the model's folder
    dtype: str
    batch: int  # requests
    prompt_tokens: int
    output_tokens: int


def published(workload: Workload, card: str) -> float | None:
    """Tokens per second: of outputs for decode, of inputs for prefill, of both for mixed. None = not measured."""
    return _figures().get(workload) if card == CARD else None


def _figures() -> dict[Workload, float]:
    qwen3, lite = "qwen3-30b-a3b", "deepseek-v2-lite"
    batches = (1, 8, 32, 64, 128, 256)
    decode: dict[tuple[str, str], tuple[int, ...]] = {
        (qwen3, "bfloat16"): (243, 880, 2000, 3567, 6757, 11312),
        (qwen3, "fp8"): (234, 1048, 2829, 5067, 9148, 14283),
        (lite, "bfloat16"): (296, 1168, 3290, 6030, 10848, 20400),
    }
    prompts = ((32, 4096), (1, 4096), (1, 512))
    prefill: dict[tuple[str, str], tuple[int, ...]] = {
        (qwen3, "bfloat16"): (65000, 59400, 31400),
        (qwen3, "fp8"): (61500, 47800, 24700),
        (lite, "bfloat16"): (86600, 73600, 28600),
    }
    found: dict[Workload, float] = {}
    for (model, dtype), speeds in decode.items():
        for batch, speed in zip(batches, speeds, strict=True):
            found[Workload("decode", model, dtype, batch, 320, 256)] = speed
    for (model, dtype), speeds in prefill.items():
        for (batch, tokens), speed in zip(prompts, speeds, strict=True):
            found[Workload("prefill", model, dtype, batch, tokens, 1)] = speed
    found[Workload("mixed", qwen3, "bfloat16", 512, 1008, 259)] = 26900
    return found
