"""Router, sampler, random numbers and norms on a card, or in Triton's interpreter, against their references."""

import pytest
import torch

from headrace.kernels.random_uniform import FRACTION_BITS, Purpose, random_uniform_ref
from headrace.kernels.rms_norm import NormWeight, add_rms_norm_ref, rms_norm_ref
from headrace.kernels.route_sigmoid import route_sigmoid_ref
from headrace.kernels.route_softmax import route_softmax_ref
from headrace.kernels.sample import INVALID_TOKEN, ONE, sample_ref
from headrace.kernels.silu_mul import silu_mul_ref
from tests.kernels.close import assert_close
from tests.kernels.shapes import normal


def check_router(
    tokens: int, experts: int, groups: tuple[int, int], top_k: int, dtype: torch.dtype, device: torch.device
) -> None:
    from headrace.kernels.route_triton import FEW_TOKENS, launch_choose, launch_logits, launch_norm_logits

    hidden = 72 if experts < 64 else 2048
    x = normal(tokens, hidden, dtype=dtype, device=device)
    gate = normal(experts, hidden, dtype=torch.float32, device=device, scale=hidden**-0.5)
    bias = normal(experts, dtype=torch.float32, device=device, scale=0.1)
    logits = launch_logits(x, gate)
    assert_close("logits", logits.sum(0), x.double() @ gate.double().T)
    for given in (bias, None):
        ids, weights = launch_choose(logits, given, top_k, *groups, True, 2.5)
        rest = (top_k, *groups, True, 2.5)
        expected_ids, expected = (
            route_softmax_ref(x, gate, *rest) if given is None else route_sigmoid_ref(x, gate, given, *rest)
        )
        # Scores that differ in their last bit may change places: compare what was chosen, not its order.
        same = (ids.sort(-1)[0] == expected_ids.sort(-1)[0]).all(-1)
        assert int((~same).sum()) <= tokens // 500
        assert_close("weights", weights.sort(-1)[0][same], expected.sort(-1)[0][same].to(weights.device))
        assert int(ids.min()) >= 0
        assert int(ids.max()) < experts
        more_ids, more = launch_choose(logits, given, *rest, 2)
        assert torch.equal(more_ids[:, :top_k], ids)
        assert torch.equal(more[:, :top_k], weights)
        assert more_ids[:, top_k:].tolist() == [[experts, experts + 1]] * tokens
        assert bool((more[:, top_k:] == 1).all())
    if tokens <= FEW_TOKENS:
        norm = NormWeight(normal(hidden, dtype=dtype, device=device), 1e-6)
        normed, logits = launch_norm_logits(x, norm, gate)
        assert_close("norm", normed, rms_norm_ref(x, norm))
        assert_close("logits of norm", logits.sum(0), normed.double() @ gate.double().T)


@pytest.mark.parametrize(("experts", "groups"), [(10, (1, 1)), (24, (4, 2))])
@pytest.mark.parametrize("tokens", [1, 13, 20])
def test_router(tokens: int, experts: int, groups: tuple[int, int], device: torch.device) -> None:
    check_router(tokens, experts, groups, 3, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("experts", "groups", "top_k"), [(128, (1, 1), 8), (64, (1, 1), 6), (256, (8, 4), 8), (160, (8, 3), 6)]
)
def test_router_on_the_card(experts: int, groups: tuple[int, int], top_k: int, device: torch.device) -> None:
    for tokens in (1, 7, 63, 129, 1000):
        check_router(tokens, experts, groups, top_k, torch.bfloat16, device)


def test_a_row_of_nan_is_routed_to_experts_that_exist(device: torch.device) -> None:
    from headrace.kernels.route_triton import launch_choose

    logits = torch.full((1, 2, 10), float("nan"), device=device)
    ids, _ = launch_choose(logits, None, 4, 1, 1, True, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2


CASES = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.3, 50, 0.8, 0.05),
    (1.0, 0, 0.01, 0.0),
    (0.5, 0, 1.0, 0.2),
]


def sampling_arguments(rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    columns = list(zip(*(CASES[i % len(CASES)] for i in range(rows)), strict=True))
    uniform = torch.randint(0, ONE, (rows,), device=device)
    return (*(torch.tensor(column, device=device) for column in columns), uniform)


@pytest.mark.parametrize("held", [16, 256], ids=["long search", "short search"])
def test_sampler_chooses_as_the_reference(held: int, device: torch.device) -> None:
    from headrace.kernels.sample_triton import launch_sample

    rows = 2 * len(CASES)
    logits = normal(rows, 203, dtype=torch.float32, device=device, scale=2.0)
    logits[len(CASES) :] = logits[len(CASES) :].round()  # ties
    logits[:, 5] = float("-inf")
    logits[3, 7] = float("nan")
    arguments = sampling_arguments(rows, device)
    found = launch_sample(logits, *arguments, one=ONE, invalid=INVALID_TOKEN, chunk=64, held=held).tokens
    assert found.tolist() == sample_ref(logits, *arguments).tolist()
    assert found[3] == INVALID_TOKEN


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [7, 1000, 102400, 151936])
def test_sampler_on_the_card(vocab: int, device: torch.device) -> None:
    """The exponential may differ in its last bit, so a few rows in a thousand may choose a neighbour."""
    from headrace.kernels.sample import sample

    rows, different = 256, 0
    for scale in (0.5, 3.0):
        logits = normal(rows, vocab, dtype=torch.float32, device=device, scale=scale)
        arguments = sampling_arguments(rows, device)
        different += int((sample(logits, *arguments) != sample_ref(logits, *arguments)).sum())
    assert different <= 4


@pytest.mark.parametrize("count", [1, 129])
def test_random_numbers_are_equal_bit_by_bit(count: int, device: torch.device) -> None:
    from headrace.kernels.random_uniform_triton import launch_random_uniform

    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), device=device)
    positions = torch.arange(count, device=device) * 1000003
    for purpose in Purpose:
        found = launch_random_uniform(seeds, positions, int(purpose), FRACTION_BITS)
        assert torch.equal(found, random_uniform_ref(seeds, positions, purpose))


def check_norm(tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    from headrace.kernels.rms_norm_triton import launch_rms_norm
    from headrace.kernels.silu_mul_triton import launch_silu_mul

    wide = normal(tokens, 2 * size, dtype=dtype, device=device)
    x, residual = wide[:, :size], normal(tokens, size, dtype=dtype, device=device)
    norm = NormWeight(normal(size, dtype=dtype, device=device), 1e-6)
    assert_close("norm", launch_rms_norm(x, None, norm.gain, norm.eps), rms_norm_ref(x, norm))
    expected_residual = residual.clone()
    expected = add_rms_norm_ref(x, expected_residual, norm)
    assert_close("norm of sum", launch_rms_norm(x, residual, norm.gain, norm.eps), expected)
    assert torch.equal(residual, expected_residual)
    assert_close("swiglu", launch_silu_mul(wide), silu_mul_ref(wide))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norm_and_swiglu(dtype: torch.dtype, device: torch.device) -> None:
    check_norm(7, 63, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_norm_and_swiglu_on_the_card(dtype: torch.dtype, device: torch.device) -> None:
    for tokens, size in ((1, 2048), (129, 1001), (1000, 2048)):
        check_norm(tokens, size, dtype, device)
