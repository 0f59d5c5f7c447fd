"""A whole engine that draws its drafts has the model's own distribution, however it picks what to verify.

Counts over many seeds behind one prompt, by the tokens before: chi-square against the model alone. Two things are
broken on purpose, and noticed: what is drawn after a rejection, and a planner that looks at the drawn tokens.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.config import SpeculationConfig
from headrace.core import mtp_drafter
from headrace.core.models.base import Model
from headrace.core.request import Request
from headrace.core.sampler import Guess, Sampler
from headrace.core.speculation.proposal import Proposal
from headrace.core.speculation.step_costs import StepCosts
from headrace.core.speculator import Speculator
from headrace.ipc.messages import Sampling
from headrace.kernels import verify as verification
from tests.core.engines import load, make_engine, run
from tests.core.ragged import whole

# Behind it the small model is sure of a token, then torn between five, of which its drafter thinks otherwise.
PROMPT = [891, 3660, 633, 3141, 1882, 3345, 2599, 490, 2692, 1081, 1817, 1440, 98, 29]
DRAWS = 800
TOP_K = 5
RULES = Sampling(max_tokens=4, temperature=1.0, top_k=TOP_K)
COMMON = 150  # a prefix that came up so often is looked at
BOUND = 5  # standard deviations of the statistic


@pytest.fixture(scope="module")
def model(small_path: Path) -> Model:
    return load(small_path)


@pytest.fixture(autouse=True)
def deep_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Second drafts too, though the first ones here are seldom right."""
    monkeypatch.setattr(mtp_drafter, "LEAST_HOPE", 0.0)


class _SetCosts(StepCosts):
    """Steps whose times do not depend on this machine."""

    def __init__(self, per_token: float) -> None:
        self.most_tokens = self.most_rows = 256
        self.whole_depth = False
        self._per_token = per_token

    def plain_ms(self, rows: int) -> float:
        return self.verify_ms(rows)

    def verify_ms(self, tokens: int) -> float:
        return 60.0 + self._per_token * tokens

    def draft_ms(self, rows: int) -> float:
        return 0.0

    def observe(self, rows: int, tokens: int, ms: float, *, drafting: bool, waited: bool) -> None:
        pass


def draw(model: Model, path: Path, *, picky: bool) -> list[list[int]]:
    """The outputs of as many requests as there are draws. `picky`: not every draft is worth its time."""
    speculation = SpeculationConfig(drafters="mtp", draft_tokens=2)
    engine = make_engine(
        model, path, num_blocks=400, max_num_seqs=32, max_num_batched_tokens=256, speculation=speculation
    )
    assert engine.speculator is not None
    engine.speculator.use_costs(_SetCosts(0.5 if picky else 0.0))
    requests = [Request(f"r{i}", PROMPT, replace(RULES, seed=i)) for i in range(DRAWS)]
    for first in range(0, DRAWS, 400):
        run(engine, requests[first : first + 400], check_each_step=False)
    counters = engine.speculator.counters
    assert counters.drafted > 100
    assert 0 < sum(counters.accepted) < counters.drafted
    return [request.output_ids for request in requests]


def excess(model: Model, outputs: Sequence[Sequence[int]]) -> float:
    """The largest chi-square of a common prefix's next tokens, in standard deviations above its mean."""
    following: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for output in outputs:
        for count in range(1, len(output)):
            following[tuple(output[:count])][output[count]] += 1
    found = []
    for prefix, counts in following.items():
        if counts.total() < COMMON:
            continue
        top = whole(model, [*PROMPT, *prefix])[-1].topk(TOP_K)
        expected = top.values.double().softmax(-1) * counts.total()
        observed = torch.tensor([counts[token] for token in top.indices.tolist()]).double()
        assert observed.sum() == counts.total(), "a token that was cut got drawn"
        common = expected >= 5
        observed = torch.cat((observed[common], observed[~common].sum(0, keepdim=True)))
        expected = torch.cat((expected[common], expected[~common].sum(0, keepdim=True))).clamp(min=1e-9)
        freedom = max(len(expected) - 1, 1)
        found.append(float((((observed - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5))
    assert len(found) >= 2
    return max(found)


@pytest.mark.parametrize("picky", [False, True], ids=["all drafts", "drafts that pay"])
def test_drawn_drafts_leave_the_distribution_alone(model: Model, small_path: Path, picky: bool) -> None:
    assert excess(model, draw(model, small_path, picky=picky)) < BOUND


def test_a_broken_residual_is_noticed(
    model: Model, small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rejection the model's own distribution again."""
    monkeypatch.setattr(verification, "residual", lambda weights, drafted: weights)
    assert excess(model, draw(model, small_path, picky=False)) > BOUND


def test_a_planner_that_looks_at_the_drawn_tokens_is_noticed(
    model: Model, small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each draft by its own probability: those that the drafter likes are verified, the others drawn anew."""
    guess = Sampler.guess

    def telling(self: Sampler, logits: Tensor, slots: Tensor, positions: Tensor, *, greedy: bool) -> Guess:
        found = guess(self, logits, slots, positions, greedy=greedy)
        assert found.probs is not None
        return replace(found, confidence=found.probs.gather(-1, found.tokens.unsqueeze(-1)).squeeze(-1))

    def looking(self: Speculator, proposal: Proposal) -> list[float]:
        return [
            self._calibration.probability("mtp drawn", depth, confidence)
            for depth, confidence in enumerate(proposal.confidences, 1)
        ]

    monkeypatch.setattr(Sampler, "guess", telling)
    monkeypatch.setattr(Speculator, "_odds", looking)
    assert excess(model, draw(model, small_path, picky=True)) > BOUND
