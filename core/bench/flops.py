"""How fast a prefill could be: the operations that it must do, over the rate that a large product reaches.

Knows shapes only. Counts what the tokens need: their own experts, no padding; the output head for one row a prompt.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from headrace.core.model_spec import MlaSpec, ModelSpec
from headrace.core.weights import needed_shapes

SIDE = 8192
PRODUCTS = 10


def parameters(spec: ModelSpec) -> int:
    """Of the main model, MTP modules left out."""
    return sum(math.prod(dims) for dims in needed_shapes(replace(spec, num_mtp=0)).values())


def product_flops(spec: ModelSpec, num_parameters: int, tokens: int, heads: int) -> float:
    """Operations of all products with weights.

    Args:
        spec: the model.
        num_parameters: see `parameters`.
        tokens: query tokens.
        heads: rows that go through the output head.
    """
    table = spec.vocab_size * spec.hidden_size
    active = num_parameters - table * (1 if spec.tied_embeddings else 2)
    if spec.moe is not None:
        one = 3 * spec.hidden_size * spec.moe.intermediate_size
        idle = spec.moe.num_experts - spec.moe.router.top_k
        active -= one * idle * sum(spec.moe_layers)
    return 2.0 * (active * tokens + table * heads)


def attention_flops(spec: ModelSpec, lengths: Sequence[int]) -> float:
    """Operations of causal attention over whole prompts; MLA's by expanded heads, the cheaper form."""
    attention = spec.attention
    if isinstance(attention, MlaSpec):
        per_pair = 2.0 * attention.num_heads * (attention.nope_dim + attention.rope_dim + attention.v_dim)
    else:
        per_pair = 4.0 * attention.num_heads * attention.head_dim
    return per_pair * spec.num_layers * sum(n * (n + 1) / 2 for n in lengths)


def product_rate(device: torch.device, *, fp8: bool) -> float | None:
    """Operations per second of the vendor's product of 8192 x 8192 matrices, bfloat16 or fp8; None on a CPU."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device=device) for _ in range(2))
    if fp8:
        a, b, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
    best = float("inf")
    for _ in range(PRODUCTS):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        if fp8:
            torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: SLF001 - the only fp8 product of torch
        else:
            a @ b
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2.0 * SIDE**3 / best
