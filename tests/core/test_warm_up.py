"""What an engine runs before its first user comes."""

from pathlib import Path

import pytest

from headrace.core.warm_up import warm_up_card
from tests.core.engines import load, make_engine


@pytest.mark.parametrize("max_num_seqs", [1, 40])
def test_warming_up_leaves_nothing_behind_and_charges_nobody(small_path: Path, max_num_seqs: int) -> None:
    engine = make_engine(
        load(small_path),
        small_path,
        num_blocks=60,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        overlap=True,
    )
    warm_up_card(engine, max_num_seqs, 64)
    assert not engine.has_work
    assert engine.kv.num_used == 0
    engine.scheduler.check_integrity()
    assert engine.charges.charged_s == pytest.approx(0, abs=1e-9)
    assert engine.charges.overhead_s > 0
