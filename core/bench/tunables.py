"""What `headrace bench tune` may choose for a model: kernels at its shapes, their candidates, calls to time.

Called by tune.py. Knows shapes and kernels, no engine.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from headrace.core.model_spec import GqaSpec, MlaSpec, ModelSpec, MoeSpec
from headrace.kernels.attention_plan import AttentionPlan, plan_device
from headrace.kernels.experts_cuda import ExpertsTuning, experts_cuda, experts_tuning
from headrace.kernels.experts_tiles import TileTuning
from headrace.kernels.gqa_prefill import GqaPrefillTuning, gqa_prefill, prefill_tuning
from headrace.kernels.mla_expanded import MlaPrefillTuning, expanded_tuning, mla_expanded
from headrace.kernels.tuned import entry

DTYPE = torch.bfloat16
CARD = torch.device("cuda")
BLOCK_SIZE = 16
PROMPT = 4096
TOKENS = (512, 8192)  # of a step with few tokens, and with many
# Mean tokens of an expert, one for each tier.
PER_EXPERT = (2, 16, 48, 144, 512)
# Tiles worth trying, by tier: tokens; then outputs, sum, warps, stages, group of each product.
BLOCKS_M = ((16,), (16, 32), (64,), (64, 128), (128,))
TILES = (
    ((32, 128, 4, 4, 8), (64, 128, 4, 3, 8), (64, 128, 4, 4, 8), (32, 256, 4, 3, 8)),
    ((32, 128, 4, 4, 8), (64, 128, 4, 3, 8), (64, 64, 4, 4, 8), (128, 64, 4, 3, 8)),
    ((64, 64, 4, 4, 8), (128, 64, 4, 3, 8), (128, 64, 8, 4, 8), (64, 128, 4, 3, 8)),
    ((64, 64, 4, 4, 8), (128, 64, 4, 3, 8), (128, 64, 8, 4, 8), (256, 64, 8, 4, 8)),
    ((128, 64, 8, 4, 8), (128, 64, 8, 3, 8), (128, 64, 8, 4, 16), (256, 64, 8, 4, 8), (256, 64, 8, 4, 16)),
)
# Tiers in which the copy engine may bring the weights.
COPIES = ((False,), (False,), (False, True), (True,), (True,))

Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Tunable:
    """A kernel at one shape. The first candidate is the present choice, and what the others must equal."""

    entry: str  # of the table
    flops: float
    candidates: tuple[Any, ...]  # dataclasses of launch choices
    calls: Callable[[Any, int], Sequence[Call]]  # that many calls of a candidate, over memory of their own


def tunables(spec: ModelSpec) -> Iterator[Tunable]:
    """Everything of this model that the table knows."""
    if spec.moe is not None:
        for tier in range(len(PER_EXPERT)):
            yield _experts(spec.moe, spec.hidden_size, tier)
    for tier in range(len(TOKENS)):
        attention = spec.attention
        yield _mla(attention, tier) if isinstance(attention, MlaSpec) else _gqa(attention, tier)


def _experts(moe: MoeSpec, hidden: int, tier: int) -> Tunable:
    size, top_k = moe.intermediate_size, moe.router.top_k
    tokens = max(2, PER_EXPERT[tier] * moe.num_experts // top_k)
    gate_up = _random(moe.num_experts, 2 * size, hidden, scale=hidden**-0.5)
    down = _random(moe.num_experts, hidden, size, scale=size**-0.5)
    present = experts_tuning(PER_EXPERT[tier], gate_up)
    tiles = [TileTuning(*values) for values in TILES[tier]]
    # One product's choice says nothing of the other's: each is tried beside the present other one.
    tried = list(product(BLOCKS_M[tier], tiles, COPIES[tier]))
    others = [ExpertsTuning(m, tile, present.down, copies) for m, tile, copies in tried]
    others += [ExpertsTuning(m, present.gate_up, tile, copies) for m, tile, copies in tried]

    def calls(choice: ExpertsTuning, count: int) -> Sequence[Call]:
        made: list[Call] = []
        for _ in range(count):
            scales, ids = torch.rand(tokens, moe.num_experts, device=CARD).topk(top_k, -1)
            x = _random(tokens, hidden)
            made.append(partial(experts_cuda, x, gate_up, down, ids, scales, None, choice))
        return made

    name = entry("experts", DTYPE, (*gate_up.shape, tier))
    flops = 6.0 * tokens * top_k * size * hidden
    return Tunable(name, flops, _distinct(present, others), calls)


def _gqa(gqa: GqaSpec, tier: int) -> Tunable:
    heads, kv_heads, dim = gqa.num_heads, gqa.num_kv_heads, gqa.head_dim
    tokens = TOKENS[tier]
    others = [
        GqaPrefillTuning(128, 64, 8, 2, 128),
        GqaPrefillTuning(128, 64, 8, 3, 128),
        GqaPrefillTuning(128, 32, 8, 3, 128),
        GqaPrefillTuning(128, 64, 8, 3, None, copies=False),
        GqaPrefillTuning(128, 128, 8, 2),
        GqaPrefillTuning(64, 64, 4, 2),
        GqaPrefillTuning(64, 64, 4, 3),
    ]

    def calls(choice: GqaPrefillTuning, count: int) -> Sequence[Call]:
        plan, blocks = _plan(tokens)
        made: list[Call] = []
        for _ in range(count):
            q, cache = _random(tokens, heads, dim), _random(2, blocks, BLOCK_SIZE, kv_heads, dim)
            made.append(
                partial(_filled, gqa_prefill, q, cache, plan, gqa.scale, width=heads * dim, tuning=choice)
            )
        return made

    present = prefill_tuning(_random(tokens, 1, 1), dim)
    flops = 4.0 * heads * dim * _pairs(tokens)
    return Tunable(entry("gqa_prefill", DTYPE, (dim, tier)), flops, _distinct(present, others), calls)


def _mla(mla: MlaSpec, tier: int) -> Tunable:
    heads, dims, rank = mla.num_heads, (mla.nope_dim, mla.rope_dim, mla.v_dim), mla.kv_lora_rank
    tokens, width = TOKENS[tier], mla.nope_dim + mla.rope_dim
    others = [
        MlaPrefillTuning(64, 64, 4, 2),
        MlaPrefillTuning(128, 64, 8, 2),
        MlaPrefillTuning(128, 64, 8, 3),
        MlaPrefillTuning(64, 32, 4, 3),
        MlaPrefillTuning(128, 64, 8, 3, copies=False),
        MlaPrefillTuning(128, 128, 8, 2, copies=False),
        MlaPrefillTuning(128, 32, 8, 2, max_registers=128),
        MlaPrefillTuning(128, 32, 8, 3, max_registers=128),
    ]

    def calls(choice: MlaPrefillTuning, count: int) -> Sequence[Call]:
        plan, blocks = _plan(tokens)
        up = _random(heads * (mla.nope_dim + mla.v_dim), rank, scale=rank**-0.5)
        rotation = torch.polar(
            torch.ones(tokens, 1, mla.rope_dim // 2), torch.randn(tokens, 1, mla.rope_dim // 2)
        ).to(CARD)
        made: list[Call] = []
        for _ in range(count):
            q, cache = _random(tokens, heads, width), _random(blocks, BLOCK_SIZE, mla.latent_dim)
            arguments = (q, cache, up, rotation, plan, mla.scale, True)
            made.append(partial(_filled, mla_expanded, *arguments, width=heads * mla.v_dim, tuning=choice))
        return made

    present = expanded_tuning(_random(tokens, 1, 1), dims)
    flops = 2.0 * heads * (width + mla.v_dim) * _pairs(tokens)
    return Tunable(entry("mla_expanded", DTYPE, (*dims, tier)), flops, _distinct(present, others), calls)


def _filled(kernel: Callable[..., None], q: Tensor, *arguments: Any, width: int, tuning: Any) -> Tensor:
    """A prefill kernel's output, poisoned before."""
    out = torch.full((q.shape[0], width), float("nan"), dtype=q.dtype, device=q.device)
    kernel(q, *arguments, out, tuning)
    return out


def _prompts(tokens: int) -> tuple[int, int]:
    """How many prompts, of how many tokens."""
    return max(1, tokens // PROMPT), min(tokens, PROMPT)


def _pairs(tokens: int) -> float:
    """Query tokens times the positions they see."""
    count, length = _prompts(tokens)
    return count * length * (length + 1) / 2


def _plan(tokens: int) -> tuple[AttentionPlan, int]:
    """Prompts without a cached prefix, over neighbouring blocks; and the number of blocks."""
    count, length = _prompts(tokens)
    each = length // BLOCK_SIZE
    tables = torch.arange(1, count * each + 1, dtype=torch.int32, device=CARD).view(count, each)
    starts = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=CARD)
    lengths = torch.full((count,), length, dtype=torch.int32, device=CARD)
    return plan_device(starts, lengths, tables, 0, length, length, tokens), count * each + 1


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=CARD).mul_(scale)


def _distinct(present: Any, others: Sequence[Any]) -> tuple[Any, ...]:
    return (present, *(other for other in others if asdict(other) != asdict(present)))
