"""Attention's kernels at the shapes of Qwen3-30B-A3B (GQA) and DeepSeek-V2-Lite (MLA). Used by kernels.py.

Decode contexts are spread evenly over 200-690 tokens, the mean of the published comparison.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from headrace.core.bench.kernel_case import Call, KernelCase
from headrace.kernels.attention_plan import AttentionPlan, plan_device
from headrace.kernels.gqa_attention import gqa_attention_paged, gqa_attention_ref
from headrace.kernels.gqa_decode import GqaDecodeTuning, gqa_decode
from headrace.kernels.gqa_prefill import GqaPrefillTuning, gqa_prefill
from headrace.kernels.mla_attend import MlaUp, mla_attend_expanded
from headrace.kernels.mla_attention import mla_attention_paged, mla_attention_ref
from headrace.kernels.mla_decode import MlaTuning, mla_decode
from headrace.kernels.mla_kv_write import mla_kv_write
from headrace.kernels.mla_query import mla_query
from headrace.kernels.mla_value import mla_value
from headrace.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from headrace.kernels.rms_norm import NormWeight

HQ, HKV, D = 32, 4, 128
H, N, R, C, V = 16, 128, 64, 512, 128
BLOCK_SIZE = 16
CAPACITY = 8192  # positions that a recorded step must allow for
DTYPE = torch.bfloat16
DEVICE = "cuda"
BATCHES = (1, 8, 32, 64, 128, 256)
Lengths = Sequence[int]


def check() -> None:
    """One ragged step of each kind against the reference."""
    query_lens, contexts = [1, 5, 70], [450, 300, 90]
    plan, blocks = _plan(query_lens, contexts)
    tokens = sum(query_lens)
    q, cache = _random(tokens, HQ, D), _random(2, blocks, BLOCK_SIZE, HKV, D)
    _close(gqa_attention_paged(q, cache, plan, 0.1), gqa_attention_ref(q, cache, plan, 0.1))
    q, cache = _random(tokens, H, C + R), _random(blocks, BLOCK_SIZE, C + R)
    _close(mla_attention_paged(q, cache, plan, 0.05, C), mla_attention_ref(q, cache, plan, 0.05, C))


def cases() -> list[KernelCase]:
    """The kernels as they are launched."""
    found = []
    for batch in BATCHES:
        spread = _contexts(batch)
        found += [
            _gqa_write(batch),
            _gqa(f"gqa decode T={batch}", [1] * batch, spread),
            _mla_write(batch),
            _mla_query(batch),
            _mla(f"mla decode T={batch}", [1] * batch, spread),
            _mla_value(batch),
        ]
    found.append(_gqa("gqa verify 64 x 4", [4] * 64, _contexts(64)))
    found.append(_mla("mla verify 64 x 4", [4] * 64, _contexts(64)))
    for batch in (1, 16):
        found.append(_gqa(f"gqa decode T={batch} context 8192", [1] * batch, [8192] * batch))
        found.append(_mla(f"mla decode T={batch} context 8192", [1] * batch, [8192] * batch))
    found.append(_gqa("gqa decode T=64 fixed splits of 256", [1] * 64, _contexts(64), split_size=256))
    found.append(_mla("mla decode T=64 fixed splits of 256", [1] * 64, _contexts(64), split_size=256))
    for query_lens, contexts in _prefills():
        name = f"prefill {len(query_lens)} x {query_lens[0]} of {contexts[0]}"
        found.append(_gqa(f"gqa {name}", query_lens, contexts))
        found.append(_mla(f"mla {name}, latent", query_lens, contexts))
        found.append(_expanded(f"mla {name}, expanded", query_lens, contexts))
    found += [_gqa_write(8192), _mla_write(8192), _mla_query(8192), _mla_value(8192)]
    return found


def sweep() -> list[KernelCase]:
    """Launch choices of the attention kernels."""
    return [*_sweep_gqa(), *_sweep_prefill(), *_sweep_mla(), *_products()]


def _sweep_gqa() -> Iterator[KernelCase]:
    for batch, shape in product((1, 8, 32, 64, 128, 256), ((64, 4, 3), (64, 4, 5), (64, 8, 5), (128, 8, 3))):
        tuning = GqaDecodeTuning(*shape)
        run = partial(_decode_gqa, tuning=tuning)
        yield _gqa(f"gqa T={batch} {_brief(tuning)}", [1] * batch, _contexts(batch), run=run)


def _sweep_prefill() -> Iterator[KernelCase]:
    for shape in ((128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3)):
        tuning = GqaPrefillTuning(*shape)
        run = partial(_prefill_gqa, tuning=tuning)
        yield _gqa(f"gqa prefill 2 x 4096 {_brief(tuning)}", [4096] * 2, [4096] * 2, run=run)


def _sweep_mla() -> Iterator[KernelCase]:
    shapes = ((16, 32, 4, 3), (16, 32, 4, 3, 64), (16, 32, 4, 3, 32, 2), (16, 32, 4, 5), (16, 64, 8, 3))
    for batch, shape in product((1, 8, 32, 64, 128, 256), shapes):
        tuning = MlaTuning(*shape)
        run = partial(_decode_mla, tuning=tuning)
        yield _mla(f"mla T={batch} {_brief(tuning)}", [1] * batch, _contexts(batch), run=run)
    for shape in ((64, 32, 8, 2), (32, 32, 8, 3), (16, 32, 4, 3)):
        tuning = MlaTuning(*shape)
        run = partial(_decode_mla, tuning=tuning)
        yield _mla(f"mla verify 64 x 4 {_brief(tuning)}", [4] * 64, _contexts(64), run=run)


def _products() -> Iterator[KernelCase]:
    """MLA's per-head products by the vendor's library, to compare."""
    for tokens in (1, 64, 256, 8192):

        def call(q: Tensor, up: Tensor, out: Tensor) -> object:
            return torch.bmm(q.transpose(0, 1), up, out=out.transpose(0, 1))

        def calls(count: int, tokens: int = tokens, call: Callable[..., object] = call) -> list[Call]:
            made: list[Call] = []
            for _ in range(count):
                q, up, out = _random(tokens, H, C), _random(H, C, V), _random(tokens, H, V)
                made.append(partial(call, q, up, out))
            return made

        size = 2.0 * (tokens * H * (C + V) + H * C * V)
        yield KernelCase(f"bmm for mla_value T={tokens}", size, 2.0 * tokens * H * C * V, calls)


def _brief(tuning: GqaDecodeTuning | GqaPrefillTuning | MlaTuning) -> str:
    """Block sizes, warps, stages and so on, in the order of the fields."""
    values = (getattr(tuning, name) for name in type(tuning).__dataclass_fields__)
    return "/".join(str(value) for value in values if value is not None)


def _prefills() -> list[tuple[Lengths, Lengths]]:
    return [([512], [512]), ([4096], [4096]), ([4096] * 2, [4096] * 2), ([1024] * 4, [5120] * 4)]


def _contexts(batch: int) -> list[int]:
    """In no order, as requests come."""
    if batch == 1:
        return [445]
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(batch)).tolist()
    return [200 + 490 * row // (batch - 1) for row in order]


def _plan(query_lens: Lengths, contexts: Lengths, split_size: int | None = None) -> tuple[AttentionPlan, int]:
    """A plan as a recorded step makes it, over shuffled blocks, and the number of blocks."""
    needed = [-(-length // BLOCK_SIZE) for length in contexts]
    blocks = sum(needed) + 1
    order = (torch.randperm(blocks - 1) + 1).int()
    tables = torch.zeros(len(contexts), CAPACITY // BLOCK_SIZE, dtype=torch.int32)
    for row, (ids, count) in enumerate(zip(order.split(needed), needed, strict=True)):
        tables[row, :count] = ids
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    decodes = next((row for row, length in enumerate(query_lens) if length > 1), len(query_lens))
    lengths = torch.tensor(contexts, dtype=torch.int32)
    longest = max(query_lens)
    plan = plan_device(
        starts.to(DEVICE),
        lengths.to(DEVICE),
        tables.to(DEVICE),
        decodes,
        longest,
        CAPACITY,
        sum(contexts[decodes:]),
        split_size,
    )
    return plan, blocks


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


def _pairs(query_lens: Lengths, contexts: Lengths) -> float:
    """Query tokens times the positions they see."""
    return sum(n * length - n * (n - 1) / 2 for n, length in zip(query_lens, contexts, strict=True))


def _gqa(
    name: str,
    query_lens: Lengths,
    contexts: Lengths,
    *,
    run: Callable[..., object] = gqa_attention_paged,
    split_size: int | None = None,
) -> KernelCase:
    tokens = sum(query_lens)

    def calls(count: int) -> list[Call]:
        plan, blocks = _plan(query_lens, contexts, split_size)
        q = _random(tokens, HQ, D)
        return [partial(run, q, _random(2, blocks, BLOCK_SIZE, HKV, D), plan, D**-0.5) for _ in range(count)]

    size = 2.0 * (2 * HKV * D * sum(contexts) + 2 * tokens * HQ * D)
    return KernelCase(name, size, 4.0 * HQ * D * _pairs(query_lens, contexts), calls)


def _mla(
    name: str,
    query_lens: Lengths,
    contexts: Lengths,
    *,
    run: Callable[..., object] = mla_attention_paged,
    split_size: int | None = None,
) -> KernelCase:
    tokens = sum(query_lens)

    def calls(count: int) -> list[Call]:
        plan, blocks = _plan(query_lens, contexts, split_size)
        q = _random(tokens, H, C + R)
        return [partial(run, q, _random(blocks, BLOCK_SIZE, C + R), plan, 0.1, C) for _ in range(count)]

    size = 2.0 * ((C + R) * sum(contexts) + tokens * H * (2 * C + R))
    return KernelCase(name, size, 2.0 * H * (2 * C + R) * _pairs(query_lens, contexts), calls)


def _expanded(name: str, query_lens: Lengths, contexts: Lengths) -> KernelCase:
    """The expanded form as a whole: gather, product, attention."""
    tokens = sum(query_lens)

    def calls(count: int) -> list[Call]:
        plan, blocks = _plan(query_lens, contexts)
        both, rotation = _random(H * (N + V), C), _turns(tokens, R)
        up = MlaUp(both[: H * N].view(H, N, C), both[H * N :].view(H, C, V), both)
        q = _random(tokens, H, N + R)
        run = partial(mla_attend_expanded, up=up, rotation=rotation, plan=plan, scale=0.1, interleaved=True)
        return [partial(run, q, _random(blocks, BLOCK_SIZE, C + R)) for _ in range(count)]

    size = 2.0 * ((C + R) * sum(contexts) + tokens * H * (N + R + V) + H * (N + V) * C)
    flops = 2.0 * H * (N + R + V) * _pairs(query_lens, contexts) + 2.0 * C * H * (N + V) * sum(contexts)
    return KernelCase(name, size, flops, calls)


def _decode_gqa(q: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, tuning: GqaDecodeTuning) -> None:
    gqa_decode(q, cache, plan, scale, torch.empty_like(q).flatten(1), tuning)


def _prefill_gqa(
    q: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, tuning: GqaPrefillTuning
) -> None:
    gqa_prefill(q, cache, plan, scale, torch.empty_like(q).flatten(1), tuning)


def _decode_mla(
    q: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, rank: int, tuning: MlaTuning
) -> None:
    mla_decode(q, cache, plan, scale, rank, q.new_empty(*q.shape[:2], rank), tuning)


def _turns(tokens: int, dim: int) -> Tensor:
    return torch.polar(torch.ones(tokens, 1, dim // 2), torch.randn(tokens, 1, dim // 2)).to(DEVICE)


def _slots(tokens: int) -> tuple[Tensor, int]:
    blocks = -(-tokens // BLOCK_SIZE) + 1
    return (torch.randperm(tokens) + BLOCK_SIZE).to(DEVICE), blocks


def _gqa_write(tokens: int) -> KernelCase:
    width = (HQ + 2 * HKV) * D

    def calls(count: int) -> list[Call]:
        slots, blocks = _slots(tokens)
        norm, rotation = NormWeight(_random(D), 1e-6), _turns(tokens, D)
        return [
            partial(
                qk_norm_rope_kv_write,
                _random(tokens, width),
                norm,
                norm,
                rotation,
                slots,
                _random(2, blocks, BLOCK_SIZE, HKV, D),
                interleaved=False,
            )
            for _ in range(count)
        ]

    return KernelCase(f"qk_norm_rope_kv_write T={tokens}", 4.0 * tokens * width, 0.0, calls)


def _mla_write(tokens: int) -> KernelCase:
    def calls(count: int) -> list[Call]:
        slots, blocks = _slots(tokens)
        norm, rotation = NormWeight(_random(C), 1e-6), _turns(tokens, R)
        return [
            partial(
                mla_kv_write,
                _random(tokens, C + R),
                norm,
                rotation,
                slots,
                _random(blocks, BLOCK_SIZE, C + R),
                interleaved=True,
            )
            for _ in range(count)
        ]

    return KernelCase(f"mla_kv_write T={tokens}", 4.0 * tokens * (C + R), 0.0, calls)


def _mla_query(tokens: int) -> KernelCase:
    def calls(count: int) -> list[Call]:
        rotation = _turns(tokens, R)
        return [
            partial(mla_query, _random(tokens, H, N + R), _random(H, N, C), rotation, interleaved=True)
            for _ in range(count)
        ]

    size = 2.0 * (tokens * H * (N + R + C + R) + H * N * C)
    return KernelCase(f"mla_query T={tokens}", size, 2.0 * tokens * H * N * C, calls)


def _mla_value(tokens: int) -> KernelCase:
    def calls(count: int) -> list[Call]:
        return [partial(mla_value, _random(tokens, H, C), _random(H, C, V)) for _ in range(count)]

    size = 2.0 * (tokens * H * (C + V) + H * C * V)
    return KernelCase(f"mla_value T={tokens}", size, 2.0 * tokens * H * C * V, calls)


def _close(out: Tensor, expected: Tensor) -> None:
    ratio = float((out.double() - expected.double()).norm() / expected.double().norm())
    assert ratio < 1e-2, f"a kernel differs from its reference: error ratio {ratio:.1e}"
