"""What the KV pool of a card gets, and the batch limits that follow the device."""

from pathlib import Path
from typing import Any

import pytest

from headrace.config import CacheConfig, Config, ConfigError, SchedulerConfig
from headrace.core.memory_profile import MemoryUse, run_largest
from tests.core.engines import load, make_engine

GIB = 1 << 30
USE = MemoryUse(total=80 * GIB, weights=30 * GIB, graphs=2 * GIB, step=3 * GIB, other=1 * GIB)


def test_the_pool_gets_what_is_left_of_its_share() -> None:
    assert USE.left(0.9) == 36 * GIB
    assert USE.left(0.5) == 4 * GIB


def test_no_room_for_the_pool_is_told_with_what_took_it() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization = 0.4 of 80.00 GiB .* weights 30.00 GiB"):
        USE.left(0.4)


def test_the_largest_steps_fill_every_slot_and_the_whole_budget(small_path: Path) -> None:
    engine = make_engine(
        load(small_path), small_path, num_blocks=60, max_num_seqs=4, max_num_batched_tokens=200
    )
    sizes: list[tuple[int, int]] = []
    schedule = engine.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> object:
        plan = schedule(*args, **kwargs)
        if plan is not None:
            sizes.append((len(plan.rows), plan.num_tokens))
        return plan

    setattr(engine.scheduler, "schedule", watched)  # noqa: B010 - mypy knows methods as fixed
    run_largest(engine, 4, 200, longest=500)
    assert sizes == [(1, 200), (4, 200)]
    assert engine.kv.num_used == 0


@pytest.mark.parametrize(
    ("given", "card", "expected"),
    [
        (SchedulerConfig(), False, (64, 512)),
        (SchedulerConfig(), True, (512, 8192)),
        (SchedulerConfig(max_num_seqs=600), False, (600, 600)),
        (SchedulerConfig(max_num_batched_tokens=40), True, (40, 40)),
        (SchedulerConfig(max_num_seqs=7, max_num_batched_tokens=30), True, (7, 30)),
    ],
    ids=["cpu", "card", "many requests", "few tokens", "both given"],
)
def test_limits_that_are_not_given_follow_the_device(
    given: SchedulerConfig, card: bool, expected: tuple[int, int]
) -> None:
    found = given.for_device(card=card)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == expected


@pytest.mark.parametrize(
    "config",
    [
        Config(scheduler=SchedulerConfig(max_num_seqs=50, max_num_batched_tokens=40)),
        Config(cache=CacheConfig(gpu_memory_utilization=1.2)),
        Config(cache=CacheConfig(gpu_memory_utilization=0.0)),
    ],
    ids=["fewer tokens than requests", "more than the card has", "nothing"],
)
def test_settings_that_cannot_work_are_refused(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.max_num_batched_tokens|gpu_memory_utilization"):
        config.resolve()
