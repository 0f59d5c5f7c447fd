"""The synthetic engine's batch, without a socket: what an engine promises, with tokens known beforehand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ipc.codec import decode_to_gateway, encode
from headrace.ipc.messages import Cancel, Credit, Finished, Goodbye, Rejected, Sampling, Submit, Tokens
from headrace.ipc.packed import float32_view, pack_int32, rows, unpack_int32
from headrace.loadtest.synthetic_batch import SyntheticBatch
from headrace.loadtest.synthetic_options import SyntheticOptions
from headrace.loadtest.synthetic_tokens import TokenSource, printable_ids

TABLE = tuple(range(100, 164))
OPTIONS = SyntheticOptions(token_ids=TABLE, max_model_len=512, vocab_size=1000)
SOURCE = TokenSource(TABLE)
GATEWAY = b"gateway"
PLENTY = 1 << 40


def submit(
    stream: int = 0, prompt: int = 3, generated: tuple[int, ...] = (), credit: int = PLENTY, **sampling: Any
) -> Submit:
    chosen = Sampling(**{"max_tokens": 10, "seed": stream + 1, **sampling})
    prompt_ids = pack_int32(range(prompt))
    return Submit(stream, f"request-{stream}", "", "", 0, prompt_ids, pack_int32(generated), chosen, credit)


class Driver:
    """Runs a batch and keeps what its gateways got; checks on the way what must hold of every message."""

    def __init__(self, **changes: Any) -> None:
        self.clock = 0.0
        self.batch = SyntheticBatch(replace(OPTIONS, **changes), lambda: self.clock)
        self.tokens: dict[tuple[bytes, int], list[int]] = {}
        self.firsts: dict[tuple[bytes, int], int] = {}
        self.finished: dict[tuple[bytes, int], Finished] = {}
        self.step_sizes: list[int] = []

    def handle(self, message: Any, gateway: bytes = GATEWAY) -> Rejected | None:
        return self.batch.handle(gateway, message)

    def step(self) -> bool:
        """One step; False if there was nothing to do."""
        step_s = self.batch.begin()
        if step_s is not None:
            self.clock += step_s
            self.take(self.batch.commit(step_s))
        else:
            self.take(self.batch.flush())
        return step_s is not None

    def run(self) -> None:
        while self.step():
            pass

    def take(self, messages: list[tuple[bytes, Tokens]]) -> None:
        assert len({gateway for gateway, _ in messages}) == len(messages), "one message a step and gateway"
        for gateway, message in messages:
            assert decode_to_gateway(encode(message)) == message
            for stream, start, ids in rows(message):
                key = (gateway, stream)
                assert key not in self.finished
                known = self.tokens.setdefault(key, [])
                if not known:
                    self.firsts[key] = start
                assert start == self.firsts[key] + len(known), "numbering has no gap"
                known += ids
            for ended in message.finished:
                assert (gateway, ended.stream) not in self.finished
                self.finished[gateway, ended.stream] = ended
        self.step_sizes.append(sum(len(message.counts) for _, message in messages))

    def output(self, stream: int = 0, gateway: bytes = GATEWAY) -> list[int]:
        return self.tokens.get((gateway, stream), [])

    def reason(self, stream: int = 0, gateway: bytes = GATEWAY) -> str:
        return self.finished[gateway, stream].reason


def test_tokens_are_a_function_of_seed_and_index() -> None:
    driver = Driver()
    for stream in range(50):
        assert driver.handle(submit(stream, max_tokens=stream + 1)) is None
    driver.run()
    for stream in range(50):
        assert driver.output(stream) == SOURCE.sequence(stream + 1, 0, stream + 1)
        assert driver.reason(stream) == "length"
        assert driver.finished[GATEWAY, stream].usage.output_tokens == stream + 1


def test_seeds_and_indices_give_different_tokens_that_use_the_whole_table() -> None:
    drawn = SOURCE.sequence(1, 0, 2000)
    assert set(drawn) == set(TABLE)
    assert drawn != SOURCE.sequence(2, 0, 2000)
    assert SOURCE.sequence(1, 700, 5) == drawn[700:705]
    assert SOURCE.sequence((1 << 63) - 1, 0, 3) == SOURCE.sequence((1 << 63) - 1, 0, 3)


def test_a_resumed_request_goes_on_with_the_same_tokens_and_numbers() -> None:
    whole = SOURCE.sequence(1, 0, 10)
    driver = Driver()
    driver.handle(submit(0, generated=tuple(whole[:4])))
    driver.run()
    assert driver.firsts[GATEWAY, 0] == 4
    assert driver.output() == whole[4:]


def test_a_request_that_was_complete_already_ends_without_tokens() -> None:
    driver = Driver()
    driver.handle(submit(0, generated=tuple(range(10))))
    driver.step()
    assert driver.output() == []
    assert driver.reason() == "length"


def test_lock_step_gives_every_running_stream_one_token_a_step() -> None:
    driver = Driver()
    for stream in range(5):
        driver.handle(submit(stream))
    driver.run()
    assert driver.step_sizes == [5] * 10 + [0]


@pytest.mark.parametrize("lanes", [2, 3, 7])
def test_rows_of_several_tokens_say_the_same(lanes: int) -> None:
    """As speculation makes them: the same stream in fewer steps, never past its end or its credit."""
    driver = Driver(tokens_per_row=lanes)
    driver.handle(submit(0, max_tokens=10))
    driver.handle(submit(1, max_tokens=10, credit=5))
    driver.run()
    assert driver.output(0) == SOURCE.sequence(1, 0, 10)
    assert driver.output(1) == SOURCE.sequence(2, 0, 5)
    assert len(driver.step_sizes) == 1 + -(-10 // lanes)


def test_out_of_credit_a_stream_is_parked_and_credit_brings_it_back() -> None:
    driver = Driver()
    driver.handle(submit(0, credit=4))
    driver.handle(submit(1))
    driver.run()
    assert len(driver.output(0)) == 4
    assert len(driver.output(1)) == 10
    load = driver.batch.load()
    assert (load.running, load.parked, load.waiting) == (0, 1, 0)
    driver.handle(Credit(0, 4))
    assert not driver.step()
    driver.handle(Credit(0, 7))
    driver.run()
    assert len(driver.output(0)) == 7
    driver.handle(Credit(0, PLENTY))
    driver.run()
    assert driver.output(0) == SOURCE.sequence(1, 0, 10)
    assert driver.batch.load().parked == 0


def test_a_stream_without_any_credit_computes_its_prompt_and_waits() -> None:
    driver = Driver()
    driver.handle(submit(0, credit=0))
    driver.run()
    assert driver.output() == []
    assert driver.batch.load().prompt_tokens == 3
    driver.handle(Credit(0, 1))
    driver.run()
    assert len(driver.output()) == 1


def test_parked_streams_hold_no_slot() -> None:
    driver = Driver(max_num_seqs=1)
    driver.handle(submit(0, credit=2))
    driver.handle(submit(1))
    driver.run()
    assert len(driver.output(0)) == 2
    assert driver.reason(1) == "length"


@pytest.mark.parametrize("when", ["waiting", "running", "parked", "resuming", "prefill"])
def test_cancel_is_answered_and_frees_what_was_held(when: str) -> None:
    driver = Driver(max_num_seqs=1, max_num_batched_tokens=100 if when != "prefill" else 2)
    driver.handle(submit(0, credit=2 if when in ("parked", "resuming") else PLENTY))
    if when != "waiting":
        driver.step()
    if when in ("parked", "resuming"):
        driver.run()
        driver.handle(submit(1))
        driver.step()
    if when == "resuming":
        driver.handle(Credit(0, 5))
    driver.handle(Cancel(0))
    driver.run()
    assert driver.reason(0) == "cancelled"
    load = driver.batch.load()
    assert (load.running, load.waiting, load.parked, load.blocks_used) == (0, 0, 0, 0)
    assert driver.batch.num_open == 0
    driver.handle(Cancel(0))
    driver.run()


def test_cancel_in_the_middle_of_a_step_drops_its_token() -> None:
    driver = Driver()
    driver.handle(submit(0))
    driver.handle(submit(1))
    driver.batch.begin()
    driver.handle(Cancel(0))
    driver.take(driver.batch.commit(0.01))
    assert driver.output(0) == []
    assert driver.reason(0) == "cancelled"
    assert len(driver.output(1)) == 1


def test_a_stop_id_ends_the_stream_and_is_its_last_token() -> None:
    expected = SOURCE.sequence(1, 0, 100)
    stop = expected[20]
    at = expected.index(stop)
    driver = Driver()
    driver.handle(submit(0, max_tokens=100, stop_token_ids=(stop, 9999)))
    driver.run()
    assert driver.reason() == "stop"
    assert driver.output() == expected[: at + 1]


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_stop_id_does_not_count_before_min_tokens(lanes: int) -> None:
    expected = SOURCE.sequence(1, 0, 400)
    stop = expected[3]
    at = next(index for index in range(5, 400) if expected[index] == stop)
    driver = Driver(tokens_per_row=lanes)
    driver.handle(submit(0, max_tokens=400, stop_token_ids=(stop,), min_tokens=5))
    driver.run()
    assert driver.output() == expected[: at + 1]


def test_logprobs_belong_to_their_rows() -> None:
    driver = Driver(tokens_per_row=2)
    driver.handle(submit(0))
    driver.handle(submit(1, logprobs=3))
    driver.handle(submit(2, logprobs=0))
    driver.batch.begin()
    ((_, message),) = driver.batch.commit(0.01)
    assert [entry.row for entry in message.logprobs] == [1, 2]
    with_top, without = message.logprobs
    chosen = [ids for _, _, ids in rows(message)][1]
    top_ids = np.array(unpack_int32(with_top.top_ids)).reshape(2, 3)
    top = float32_view(with_top.top).reshape(2, 3)
    assert top_ids[:, 0].tolist() == chosen
    assert (np.diff(top) < 0).all()
    assert (float32_view(with_top.chosen) == top[:, 0]).all()
    assert (float32_view(with_top.chosen) <= 0).all()
    assert without.top_k == 0
    assert without.top_ids == b""


def test_a_long_prompt_is_computed_in_chunks() -> None:
    driver = Driver(max_num_batched_tokens=50)
    driver.handle(submit(0, prompt=120))
    assert [driver.step() for _ in range(3)] == [True] * 3
    assert driver.step_sizes == [0, 0, 1]


def test_a_step_costs_what_the_curve_says() -> None:
    driver = Driver(step_ms=20.0, token_ms=1.0)
    driver.handle(submit(0, prompt=30))
    assert driver.batch.begin() == pytest.approx(0.050)
    driver.batch.commit(0.05)
    assert driver.batch.begin() == pytest.approx(0.021)


def test_usage_and_load_add_up() -> None:
    driver = Driver(step_ms=10.0)
    driver.handle(submit(0, prompt=20, max_tokens=5))
    driver.step()
    load = driver.batch.load()
    assert (load.running, load.blocks_used, load.step, load.output_tokens) == (1, 2, 1, 1)
    driver.run()
    usage = driver.finished[GATEWAY, 0].usage
    assert (usage.prompt_tokens, usage.output_tokens) == (20, 5)
    assert (usage.queue_s, usage.prefill_s, usage.decode_s) == pytest.approx((0, 0.01, 0.04))
    assert driver.batch.load().busy_s == pytest.approx(0.05)


def test_bills_and_overhead_add_up_to_the_busy_time() -> None:
    """Streams of different lengths, one cancelled on the way, a prompt that takes a step for itself."""
    driver = Driver(step_ms=10.0, max_num_batched_tokens=8)
    for stream in range(5):
        driver.handle(submit(stream, prompt=3 + 4 * stream, max_tokens=2 + 3 * stream))
    for _ in range(6):
        driver.step()
    driver.handle(Cancel(4))
    driver.run()
    bills = [finished.usage.gpu_ms for finished in driver.finished.values()]
    load = driver.batch.load()
    assert len(bills) == 5
    assert sum(bills) / 1e3 + load.overhead_s == pytest.approx(load.busy_s)
    assert max(bills) > 2 * min(bills)


def test_lower_priority_numbers_run_first() -> None:
    driver = Driver(max_num_seqs=1)
    for stream, priority in ((0, 5), (1, 0), (2, -3), (3, 0)):
        driver.handle(replace(submit(stream), priority=priority))
    driver.run()
    assert [stream for _, stream in driver.finished] == [2, 1, 3, 0]


def test_blocks_bound_what_runs_at_once() -> None:
    driver = Driver(num_blocks=2)
    for stream in range(3):
        driver.handle(submit(stream, prompt=3, max_tokens=13))
    driver.step()
    load = driver.batch.load()
    assert (load.running, load.waiting, load.blocks_used) == (2, 1, 2)
    driver.run()
    assert len(driver.finished) == 3


@pytest.mark.parametrize(
    ("message", "code", "says"),
    [
        (submit(0, prompt=0), "bad_request", "prompt is empty"),
        (submit(0, prompt=512), "too_long", "512 tokens, the context holds 512"),
        (submit(0, prompt=500), "too_long", "needs 32 blocks, the pool has 8"),
        (submit(7), "bad_request", "stream 7 is in use"),
        (replace(submit(0), prompt=pack_int32([1000])), "bad_request", "token id 1000"),
    ],
)
def test_what_is_not_taken_is_rejected_with_numbers(message: Submit, code: str, says: str) -> None:
    driver = Driver(num_blocks=8)
    assert driver.handle(submit(7)) is None
    rejected = driver.handle(message)
    assert rejected is not None
    assert rejected.code == code
    assert says in rejected.message
    assert driver.batch.num_open == 1


def test_a_full_queue_rejects() -> None:
    driver = Driver(max_num_seqs=1, max_waiting=2)
    driver.handle(submit(0))
    driver.step()
    assert driver.handle(submit(1)) is None
    assert driver.handle(submit(2)) is None
    assert driver.handle(submit(3)) == Rejected(3, "queue_full", "2 requests wait, the limit is 2")


def test_output_ends_where_the_context_does() -> None:
    driver = Driver()
    driver.handle(submit(0, prompt=505, max_tokens=100))
    driver.run()
    assert len(driver.output()) == 7
    assert driver.reason() == "length"


def test_draining_rejects_the_new_and_ends_the_old() -> None:
    driver = Driver()
    driver.handle(submit(0))
    driver.step()
    driver.batch.draining = True
    rejected = driver.handle(submit(1))
    assert rejected is not None
    assert rejected.code == "draining"
    assert driver.batch.load().state == "draining"
    driver.run()
    assert driver.reason() == "length"


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_gateway_that_leaves_takes_its_streams_along(goodbye: bool) -> None:
    driver = Driver(max_num_seqs=2)
    for stream in range(4):
        driver.handle(submit(stream), b"leaving")
    driver.handle(submit(0), b"staying")
    driver.step()
    if goodbye:
        driver.handle(Goodbye(), b"leaving")
    else:
        driver.batch.drop(b"leaving")
    driver.run()
    assert driver.output(0, b"staying") == SOURCE.sequence(1, 0, 10)
    assert not [key for key in driver.finished if key[0] == b"leaving"]
    driver.handle(submit(0), b"next")
    driver.run()
    assert driver.output(0, b"next") == SOURCE.sequence(1, 0, 10)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_traffic_ends_with_every_stream_whole_and_nothing_held(seed: int) -> None:
    """Random submits, credits, cancels, leavings and steps; then everything gets credit and must end."""
    chance = np.random.default_rng(seed)
    driver = Driver(
        max_num_seqs=int(chance.integers(1, 6)),
        tokens_per_row=int(chance.integers(1, 4)),
        max_num_batched_tokens=int(chance.integers(24, 60)),
        num_blocks=int(chance.integers(4, 30)),
    )
    wanted: dict[tuple[bytes, int], int] = {}
    cancelled: set[tuple[bytes, int]] = set()
    gateways = [b"one", b"two"]
    for stream in range(60):
        gateway = gateways[int(chance.integers(2))]
        length = int(chance.integers(1, 30))
        message = submit(
            stream, int(chance.integers(1, 30)), credit=int(chance.integers(0, 20)), max_tokens=length
        )
        assert driver.handle(message, gateway) is None
        wanted[gateway, stream] = length
        for _ in range(int(chance.integers(4))):
            driver.step()
        keys = list(wanted)
        key = keys[int(chance.integers(len(keys)))]
        if chance.random() < 0.5:
            driver.handle(Credit(key[1], int(chance.integers(40))), key[0])
        elif chance.random() < 0.3:
            driver.handle(Cancel(key[1]), key[0])
            cancelled.add(key)
        if chance.random() < 0.02:
            driver.batch.drop(gateway)
            wanted = {key: length for key, length in wanted.items() if key[0] != gateway}
    for gateway, stream in wanted:
        driver.handle(Credit(stream, PLENTY), gateway)
    driver.run()
    for key, length in wanted.items():
        whole = SOURCE.sequence(key[1] + 1, 0, length)
        if driver.finished[key].reason == "length":
            assert driver.tokens[key] == whole
        else:
            assert key in cancelled
            assert driver.tokens.get(key, []) == whole[: len(driver.tokens.get(key, []))]
    load = driver.batch.load()
    assert (driver.batch.num_open, load.running, load.waiting, load.parked, load.blocks_used) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert not driver.batch._queue._reserved


def test_printable_ids_of_the_embedded_model_are_words(embedded_path: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the package needs it anyway")
    tokenizer = tokenizers.Tokenizer.from_file(str(embedded_path / "tokenizer.json"))
    ids = printable_ids(embedded_path)
    assert len(ids) > 100
    text = tokenizer.decode(TokenSource(ids).sequence(1, 0, 200))
    assert text.isascii()
    assert text.replace(" ", "").isalpha()


def test_a_folder_without_a_tokenizer_is_an_error_that_says_what_to_do(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="--token-ids"):
        printable_ids(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"<s>": 0, "12": 1}}}')
    with pytest.raises(ValueError, match="--token-ids"):
        printable_ids(tmp_path)
