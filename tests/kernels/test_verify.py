"""Verification of drafts: against plain definitions, against `sample`, and the card's side against the reference."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from headrace.kernels.sample import INVALID_TOKEN, ONE, sample, sample_ref
from headrace.kernels.verify import Verified, verify, verify_ref

RULES = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.3, 50, 0.8, 0.05),
    (0.5, 0, 1.0, 0.2),
]


@dataclass(frozen=True)
class Case:
    """Arguments of `verify`."""

    logits: Tensor
    query_starts: Tensor
    drafts: Tensor
    draft_probs: Tensor | None
    draft_at: Tensor | None
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    accept_uniform: Tensor
    sample_uniform: Tensor

    def run(self) -> Verified:
        return verify(**vars(self))

    def rules(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.temperature, self.top_k, self.top_p, self.min_p


def make_case(
    lengths: list[int],
    vocab: int,
    *,
    stochastic: bool,
    device: torch.device,
    seed: int = 0,
    scale: float = 2.0,
) -> Case:
    """Rows of so many query tokens under mixed rules; drafts are drawn from distributions near the model's."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    logits = torch.randn(count, vocab, generator=generator) * scale
    starts = torch.tensor([0, *lengths]).cumsum(0)
    probs = torch.softmax(logits + torch.randn(count, vocab, generator=generator) / 2, -1)
    drafts = torch.multinomial(probs, 1, generator=generator)[:, 0]
    last = starts[1:][torch.tensor(lengths) > 0] - 1
    drafts[last] = -1
    # Of the stochastic rows every third draft has no distribution; the others stand in another order.
    order = torch.randperm(count, generator=generator)
    at = torch.where((torch.arange(count) % 3 == 1) | (drafts < 0), -1, order)
    spread = torch.empty_like(probs)
    spread[order] = probs
    columns = list(zip(*(RULES[i % len(RULES)] for i in range(count)), strict=True))
    uniform = torch.randint(0, ONE, (2, count), generator=generator)
    temperature, top_k, top_p, min_p = (torch.tensor(column, device=device) for column in columns)
    return Case(
        logits.to(device),
        starts.to(torch.int32).to(device),
        drafts.to(device),
        spread.to(device) if stochastic else None,
        at.to(device) if stochastic else None,
        temperature,
        top_k,
        top_p,
        min_p,
        *uniform.to(device).unbind(),
    )


def emitted(verified: Verified, starts: Tensor) -> list[list[int]]:
    """What each row gives out."""
    return [
        verified.tokens[start : min(start + count + 1, end)].tolist()
        for start, end, count in zip(
            starts.tolist(), starts.tolist()[1:], verified.accepted.tolist(), strict=False
        )
    ]


def by_the_book(case: Case) -> list[list[int]]:
    """Row by row and draft by draft, in plain Python over `sample` and float64 distributions."""
    plain = sample_ref(case.logits, *case.rules(), case.sample_uniform).tolist()
    rows = []
    starts = case.query_starts.tolist()
    for start, end in pairwise(starts):
        row: list[int] = []
        for at in range(start, end):
            draft = int(case.drafts[at])
            q_row = -1 if case.draft_at is None else int(case.draft_at[at])
            if draft < 0 or q_row < 0 or case.temperature[at] == 0 or plain[at] == INVALID_TOKEN:
                row.append(plain[at])
                stands = plain[at] == draft and draft >= 0
            else:
                assert case.draft_probs is not None
                p, q = kept_distribution(case, at), case.draft_probs[q_row].double()
                stands = float(case.accept_uniform[at]) / ONE * float(q[draft]) < float(p[draft])
                row.append(draft if stands else inverse(p - q, float(case.sample_uniform[at]) / ONE))
            if not stands:
                break
        rows.append(row)
    return rows


def kept_distribution(case: Case, at: int) -> Tensor:
    """[V] float64 that `sample` draws from: cut by cut, in floating point."""
    temperature, top_k, top_p, min_p = (float(value[at]) for value in case.rules())
    probs = torch.softmax(case.logits[at].double() / temperature, dim=-1)
    probs = torch.where(probs >= min_p * probs.max(), probs, 0.0)
    if top_k and top_k < len(probs):
        probs = torch.where(probs >= probs.sort(descending=True).values[int(top_k) - 1], probs, 0.0)
    probs /= probs.sum()
    ordered, ids = probs.sort(descending=True)
    if top_p < 1:
        probs[ids[ordered.cumsum(0) - ordered >= top_p]] = 0.0
    return probs / probs.sum()


def inverse(rest: Tensor, share: float) -> int:
    """The token at which the running sum of what is positive in `rest` passes `share` of it."""
    running = rest.clamp(min=0).cumsum(0)
    return int((running <= share * running[-1]).sum())


LENGTHS = [1, 4, 2, 0, 9, 1, 3, 0]


@pytest.mark.parametrize("vocab", [2, 7, 203])
def test_drafts_with_a_distribution_follow_the_published_rule(vocab: int) -> None:
    lengths = torch.tensor(LENGTHS)
    fell = stood = 0
    for seed in range(30):
        case = make_case(LENGTHS, vocab, stochastic=True, device=torch.device("cpu"), seed=seed)
        found = case.run()
        assert emitted(found, case.query_starts) == by_the_book(case)
        stood += int(found.accepted.sum())
        fell += int((found.accepted + 1 < lengths).sum())
    assert stood > 20
    assert fell > 20


@pytest.mark.parametrize("vocab", [2, 203])
def test_drafts_without_a_distribution_never_change_a_token(vocab: int) -> None:
    """Whatever was drafted, a row emits what plain decoding chooses, as far as the drafts were right."""
    for seed in range(20):
        case = make_case(LENGTHS, vocab, stochastic=False, device=torch.device("cpu"), seed=seed, scale=4.0)
        plain = sample(case.logits, *case.rules(), case.sample_uniform)
        found = case.run()
        assert torch.equal(found.tokens, plain)
        starts = case.query_starts.tolist()
        for row, (start, end) in enumerate(pairwise(starts)):
            right = (plain[start:end] == case.drafts[start:end]).tolist()
            assert int(found.accepted[row]) == (right.index(False) if right else 0)


def test_rows_of_one_query_token_are_sampled_bit_by_bit() -> None:
    case = make_case([1] * 40, 77, stochastic=True, device=torch.device("cpu"))
    found = case.run()
    assert torch.equal(found.tokens, sample(case.logits, *case.rules(), case.sample_uniform))
    assert not found.accepted.any()


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_query_token_with_nan_accepts_nothing_and_is_reported(stochastic: bool) -> None:
    for temperature in (0.0, 1.0):
        case = make_case([3, 3], 50, stochastic=stochastic, device=torch.device("cpu"))
        case = replace(case, temperature=torch.full((6,), temperature))
        clean = case.run()
        logits = case.logits.clone()
        logits[0, 20] = float("nan")
        found = replace(case, logits=logits).run()
        assert emitted(found, case.query_starts)[0] == [INVALID_TOKEN]
        assert emitted(found, case.query_starts)[1] == emitted(clean, case.query_starts)[1]


GRID = 250


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), RULES[1:])
@pytest.mark.parametrize("drafter", ["near", "far", "same", "one token"])
def test_every_pair_of_uniforms_together_gives_the_models_distribution(
    drafter: str, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """All drafts of four tokens times a grid over both uniforms: exact but for the grid's step."""
    logits = torch.tensor([0.3, 1.1, -0.4, 0.9])
    p = torch.softmax(logits / temperature, -1)
    q = {
        "near": torch.softmax(logits + torch.tensor([0.3, -0.2, 0.4, 0.1]), -1),
        "far": torch.tensor([0.05, 0.05, 0.8, 0.1]),
        "same": p,
        "one token": torch.tensor([0.0, 1.0, 0.0, 0.0]),
    }[drafter]
    middles = ((torch.arange(GRID).double() + 0.5) / GRID * ONE).long()
    drafts = torch.arange(4).repeat_interleave(GRID * GRID)
    rows = len(drafts)
    # Every row is its draft and the query token behind it, whose own choice is not looked at.
    pairs = torch.stack((drafts, torch.full((rows,), -1)), 1).flatten()
    case = Case(
        logits.expand(2 * rows, -1),
        torch.arange(0, 2 * rows + 1, 2, dtype=torch.int32),
        pairs,
        q[None],
        torch.where(pairs < 0, -1, 0),
        torch.full((2 * rows,), temperature),
        torch.full((2 * rows,), min(top_k, 4)),
        torch.full((2 * rows,), top_p),
        torch.full((2 * rows,), min_p),
        middles.repeat_interleave(GRID).repeat(4).repeat_interleave(2),
        middles.repeat(GRID * 4).repeat_interleave(2),
    )
    first = case.run().tokens[::2]
    found = torch.zeros(4, dtype=torch.float64).index_add(0, first, q.double()[drafts] / GRID**2)
    assert (found - kept_distribution(case, 0)).abs().max() < 1.5 / GRID


def run_card(case: Case, chunk: int) -> Verified:
    """The card's side, here in Triton's interpreter where no card is."""
    from headrace.kernels.verify_triton import launch_verify

    return Verified(
        *launch_verify(
            case.logits,
            case.query_starts,
            case.drafts,
            case.draft_probs,
            case.draft_at,
            case.rules(),
            case.accept_uniform,
            case.sample_uniform,
            one=ONE,
            invalid=INVALID_TOKEN,
            chunk=chunk,
        )
    )


@pytest.mark.parametrize("stochastic", [False, True])
def test_the_cards_side_verifies_as_the_reference(stochastic: bool, device: torch.device) -> None:
    case = make_case([1, 4, 0, 2, 19], 131, stochastic=stochastic, device=device)
    case.logits[5, 3] = float("nan")
    case.logits[:, 7] = float("-inf")
    starts = case.query_starts
    assert emitted(run_card(case, 64), starts) == emitted(verify_ref(**vars(case)), starts)


def test_query_tokens_of_no_row_are_harmless(device: torch.device) -> None:
    """A graph's padded query tokens, behind all rows."""
    case = make_case([3, 2, 4], 90, stochastic=True, device=device)
    starts = torch.tensor([0, 3, 5, 5, 5], dtype=torch.int32, device=device)
    short = replace(case, query_starts=starts)
    expected = emitted(verify_ref(**vars(case)), case.query_starts)[:2]
    for found in (run_card(short, 64), verify_ref(**vars(short))):
        assert emitted(found, starts)[:2] == expected
        assert found.accepted.tolist()[2:] == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("vocab", [7, 1000, 102400, 151936])
def test_verification_on_the_card(vocab: int, stochastic: bool, device: torch.device) -> None:
    """The exponential may differ in its last bit, so a row in hundreds may choose a neighbour."""
    rows = different = 0
    for seed in range(4):
        lengths = [1 + i % 9 for i in range(54)]
        case = make_case(lengths, vocab, stochastic=stochastic, device=device, seed=seed)
        found, expected = (emitted(side(**vars(case)), case.query_starts) for side in (verify, verify_ref))
        rows += len(found)
        different += sum(a != b for a, b in zip(found, expected, strict=True))
    assert different <= rows // 100


@pytest.mark.gpu
def test_verification_in_a_graph_follows_its_inputs(device: torch.device) -> None:
    """Recorded once; other rows, drafts and rules at replay, and no wait for the device while recording."""
    cases = [make_case([4] * 8, 1000, stochastic=True, device=device, seed=seed) for seed in (0, 1)]
    cases[1] = replace(cases[1], query_starts=torch.arange(9, dtype=torch.int32, device=device) * 4)
    static = Case(*(value.clone() for value in vars(cases[0]).values()))
    static.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = static.run()
    for case in cases:
        for target, value in zip(vars(static).values(), vars(case).values(), strict=True):
            target.copy_(value)
        graph.replay()
        expected = case.run()
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.accepted, expected.accepted)
