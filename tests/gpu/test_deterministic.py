"""`--deterministic` on a card: whole logits of a greedy answer, bit by bit, alone and in any company."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.core.build import Built
from headrace.core.models.base import Model
from headrace.core.request import Request
from headrace.ipc.messages import Sampling
from tests.gpu.models import FAMILIES, make, prompts
from tests.gpu.record import LogitRecord

pytestmark = pytest.mark.gpu
OUTPUTS = 48
GREEDY = Sampling(max_tokens=OUTPUTS, temperature=0.0)


def answer(
    built: Built, text: list[int], others: list[Request], generated: list[int] | None = None
) -> tuple[list[int], dict[int, Tensor]]:
    """Output ids of `text`, and the logits [V] of each of its positions that chose."""
    record = LogitRecord(built)
    subject = Request("subject", text, GREEDY, generated=generated or ())
    for request in (*others[::2], subject, *others[1::2]):
        built.engine.submit(request)
    slot = -1
    kept: dict[int, Tensor] = {}
    while built.engine.has_work:
        record.rows.clear()
        built.engine.step()
        slot = subject.slot if subject.slot >= 0 else slot
        kept |= {position: row for (owner, position), row in record.rows.items() if owner == slot}
        if subject.finished:
            break
    return subject.output_ids, kept


def assert_same(found: dict[int, Tensor], expected: dict[int, Tensor]) -> None:
    """Positions behind the end may have been computed ahead; what both have is equal."""
    both = sorted(found.keys() & expected.keys())
    assert len(both) >= OUTPUTS - 12
    differing = [at for at in both if not torch.equal(found[at], expected[at])]
    assert not differing, f"{len(differing)} of {len(both)} positions differ, the first at {differing[0]}"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_greedy_answer_has_the_same_bits_alone_and_among_255_others(
    name: str, folders: dict[str, Path], models: dict[str, Model]
) -> None:
    """The others' prompts cut the subject's into chunks, and their decodes fill every graph size on the way."""
    text = prompts(1, 330, 330, seed=7)[0]

    def engine() -> Built:
        return make(
            models[name],
            folders[name],
            max_num_seqs=256,
            max_num_batched_tokens=700,
            num_blocks=9000,
            deterministic=True,
        )

    tokens, alone = answer(engine(), text, [])
    others = [
        Request(f"other-{i}", other, Sampling(max_tokens=20 + i % 90, temperature=0.7 * (i % 2), seed=i))
        for i, other in enumerate(prompts(255, 10, 400, seed=8))
    ]
    crowded, among = answer(engine(), text, others)
    assert crowded == tokens
    assert_same(among, alone)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_goes_on_with_the_same_bits_in_another_engine(
    name: str, folders: dict[str, Path], models: dict[str, Model]
) -> None:
    """What decodes computed there, a prefill computes here; a budget of another size cuts it elsewhere."""
    text = prompts(1, 200, 200, seed=9)[0]
    tokens, whole = answer(make(models[name], folders[name], deterministic=True), text, [])
    moved, rest = answer(
        make(models[name], folders[name], max_num_batched_tokens=48, deterministic=True),
        text,
        [],
        generated=tokens[:10],
    )
    assert moved == tokens
    assert_same(rest, whole)


def test_the_kernels_of_every_day_do_not_promise_this(
    folders: dict[str, Path], models: dict[str, Model]
) -> None:
    """If they did, `--deterministic` would be a flag without a use, and the tests above would prove nothing."""
    text = prompts(1, 330, 330, seed=7)[0]
    name = "qwen3_moe"

    def run(others: list[Request]) -> dict[int, Tensor]:
        built = make(
            models[name], folders[name], max_num_seqs=256, max_num_batched_tokens=700, num_blocks=9000
        )
        return answer(built, text, others)[1]

    others = [Request(f"o{i}", other, GREEDY) for i, other in enumerate(prompts(255, 10, 400, seed=8))]
    alone, among = run([]), run(others)
    both = alone.keys() & among.keys()
    assert any(not torch.equal(alone[at], among[at]) for at in both)
