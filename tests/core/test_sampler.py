"""The sampler's buffers by slot: each request's own rules, and nothing left of the one before."""

import pytest
import torch

from headrace.core.request import Request
from headrace.core.sampler import Sampled, Sampler
from headrace.ipc.messages import Sampling

VOCAB = 50


def make_sampler() -> Sampler:
    return Sampler(4, VOCAB, torch.device("cpu"))


def enter(
    sampler: Sampler, slot: int, sampling: Sampling, prompt: list[int], output: tuple[int, ...] = ()
) -> None:
    sampler.enter(slot, Request(f"r{slot}", prompt, sampling, generated=output))


def draw(sampler: Sampler, logits: torch.Tensor, slots: list[int], positions: list[int]) -> Sampled:
    return sampler.sample(logits.clone(), torch.tensor(slots), slots, torch.tensor(positions))


def greedy(**rules: object) -> Sampling:
    return Sampling(max_tokens=10, temperature=0.0, **rules)  # type: ignore[arg-type]


def test_presence_and_frequency_count_output_only() -> None:
    """Token 1 stands in the prompt, token 2 twice in the output."""
    sampler = make_sampler()
    logits = torch.zeros(1, VOCAB)
    logits[0, [1, 2, 3]] = torch.tensor([2.0, 3.0, 1.0])
    enter(sampler, 0, greedy(presence_penalty=0.4, frequency_penalty=0.4), [1, 1, 1], (2, 2))
    assert draw(sampler, logits, [0], [5]).tokens.tolist() == [1], "3.0 - 0.4 - 2 * 0.4 is below 2.0"
    enter(sampler, 0, greedy(presence_penalty=0.4, frequency_penalty=0.2), [1, 1, 1], (2, 2))
    assert draw(sampler, logits, [0], [5]).tokens.tolist() == [2], "3.0 - 0.4 - 2 * 0.2 is above 2.0"


def test_repetition_penalty_counts_prompt_and_output_and_pushes_both_signs_down() -> None:
    sampler = make_sampler()
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, [1, 2, 3]] = torch.tensor([3.0, 2.5, 2.0])
    enter(sampler, 0, greedy(repetition_penalty=2.0), [1], (2,))
    assert draw(sampler, logits, [0], [2]).tokens.tolist() == [3]
    logits[0, [1, 2, 3]] = torch.tensor([-1.0, -3.0, -1.5])
    enter(sampler, 0, greedy(repetition_penalty=2.0), [1], (2,))
    assert draw(sampler, logits, [0], [2]).tokens.tolist() == [3]


def test_a_sampled_token_counts_from_the_next_step_on() -> None:
    sampler = make_sampler()
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 5]] = torch.tensor([1.0, 0.5])
    enter(sampler, 2, greedy(frequency_penalty=0.3), [9])
    chosen = [draw(sampler, logits, [2], [position]).tokens.item() for position in range(1, 6)]
    assert chosen == [4, 4, 5, 4, 5]


def test_logit_bias_is_added() -> None:
    sampler = make_sampler()
    enter(sampler, 1, greedy(logit_bias=((7, 5.0), (8, -100.0))), [0])
    logits = torch.zeros(1, VOCAB)
    logits[0, 8] = 50.0
    assert draw(sampler, logits, [1], [1]).tokens.tolist() == [7]


def test_stop_ids_are_barred_until_the_minimum_is_reached() -> None:
    sampler = make_sampler()
    enter(sampler, 0, greedy(min_tokens=2, stop_token_ids=(6,)), [1, 1, 1])
    logits = torch.zeros(1, VOCAB)
    logits[0, [6, 7]] = torch.tensor([9.0, 1.0])
    chosen = [draw(sampler, logits, [0], [position]).tokens.item() for position in (3, 4, 5)]
    assert chosen == [7, 7, 6]


def test_a_slot_keeps_nothing_of_the_request_before() -> None:
    """Every rule at once, then a plain request in the same slot."""
    sampler = make_sampler()
    heavy = greedy(
        presence_penalty=2.0,
        repetition_penalty=5.0,
        logit_bias=((3, 9.0),),
        min_tokens=9,
        stop_token_ids=(1,),
    )
    enter(sampler, 0, heavy, [1, 2, 3], (4,))
    logits = torch.zeros(1, VOCAB)
    logits[0, 1] = 1.0
    assert draw(sampler, logits, [0], [4]).tokens.tolist() == [3]
    enter(sampler, 0, greedy(logprobs=-1), [1])
    sampled = draw(sampler, logits, [0], [1])
    assert sampled.tokens.tolist() == [1]
    assert sampled.logprobs is None


def test_rules_of_one_row_leave_the_others_alone() -> None:
    sampler = make_sampler()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, VOCAB, generator=generator)
    rules = Sampling(max_tokens=9, seed=3, temperature=0.8, top_p=0.9)
    for slot in range(3):
        enter(sampler, slot, rules, [1])
    alone = [draw(sampler, logits[row : row + 1], [row], [row + 1]).tokens.item() for row in range(3)]
    enter(sampler, 1, greedy(presence_penalty=1.0, logit_bias=((0, -5.0),)), [1], (2,))
    mixed = draw(sampler, logits, [0, 1, 2], [1, 2, 3]).tokens.tolist()
    assert [mixed[0], mixed[2]] == [alone[0], alone[2]]


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_are_the_models_own(count: int) -> None:
    """Before temperature and penalties, as OpenAI reports them; only for rows that ask."""
    sampler = make_sampler()
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    enter(sampler, 0, greedy(), [1])
    enter(sampler, 1, greedy(logprobs=count, logit_bias=((5, 50.0),)), [1])
    found = draw(sampler, logits, [0, 1], [1, 1]).logprobs
    assert found is not None
    expected = torch.log_softmax(logits[1], dim=-1)
    assert found.rows == (1,)
    torch.testing.assert_close(found.chosen, expected[[5]])
    torch.testing.assert_close(found.top[0], expected.topk(count).values)
    assert found.top_ids.shape == (1, count)


@pytest.mark.parametrize("exact", [False, True])
def test_a_drafter_that_thinks_as_the_model_does_is_right_for_whoever_wants_his_tokens_again(
    exact: bool,
) -> None:
    """Seeded requests, and all with --deterministic: the number that will choose the token draws the draft."""
    sampler = Sampler(4, VOCAB, torch.device("cpu"), exact=exact)
    rules = Sampling(max_tokens=9, temperature=0.9, top_p=0.8, top_k=20, min_p=0.01, seed=5, seeded=not exact)
    for slot in range(4):
        enter(sampler, slot, rules, [1])
    slots, positions = torch.arange(4).repeat(50), torch.arange(200)
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    guess = sampler.guess(logits, slots, positions, greedy=False)
    assert torch.equal(guess.tokens, sampler.choose(logits, slots, positions))
    probs = (logits / 0.9).softmax(-1)
    assert torch.allclose(guess.confidence, probs.gather(-1, guess.tokens.unsqueeze(-1)).squeeze(-1))


def test_freely_drawn_drafts_have_numbers_of_their_own_and_tell_nothing_of_the_token() -> None:
    sampler = make_sampler()
    enter(sampler, 0, Sampling(max_tokens=9, temperature=0.9, seed=5), [1])
    slots, positions = torch.zeros(200, dtype=torch.int64), torch.arange(200)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)).expand(200, -1)
    guess = sampler.guess(logits, slots, positions, greedy=False)
    assert not torch.equal(guess.tokens, sampler.choose(logits, slots, positions))
    assert len(guess.tokens.unique()) > 5
    assert len(guess.confidence.unique()) == 1
