"""The metrics page and the workers' exchange behind it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.gateway.dispatcher import Dispatcher
from headrace.gateway.metrics import Metrics
from headrace.gateway.peers import Peers, load_tally, socket_path
from headrace.gateway.stats import WorkerStats
from headrace.gateway.tally import Tally, TallyError
from headrace.ipc.messages import Load, ToEngine, ToGateway, Usage, Welcome


class SilentSocket:
    """An engine's socket that takes everything and says nothing."""

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def send(self, _message: ToEngine) -> bool:
        return True


def silent(
    _address: str, _on_message: Callable[[ToGateway], None], _on_state: Callable[[str, str], None]
) -> SilentSocket:
    return SilentSocket()


def make_metrics(base: Tally | None = None, engines: int = 1) -> tuple[Metrics, Dispatcher, WorkerStats]:
    dispatcher = Dispatcher([f"ipc://{i}" for i in range(engines)], silent, max_streams=4)
    worker = WorkerStats()
    return Metrics("m", dispatcher, worker, base), dispatcher, worker


def samples(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of a page by name and sorted labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


ENGINE_0 = (("engine", "0"), ("model_name", "m"))


@pytest.mark.parametrize(
    "name",
    [
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
    ],
)
def test_the_page_has_vllms_names(name: str) -> None:
    metrics, dispatcher, _ = make_metrics()
    link = dispatcher.engines[0]
    link.stats.on_finished("stop", "", Usage(3, 1, 2, 0.01, 0.02, 0.03, 0), 0.5)
    link.on_message(Load("e", "ready", 0.0, 3, 2, 1, 16, 64, 9, 1.5, 10, 11, 12, 13, 14, 15, 16, 2.5))
    page, content_type = metrics.page((), "")
    assert f"headrace:{name}" in {key[0] for key in samples(page)}
    assert content_type.startswith("text/plain")


def test_engine_figures_come_from_the_newest_heartbeat() -> None:
    metrics, dispatcher, _ = make_metrics()
    link = dispatcher.engines[0]
    link.on_message(Welcome(1, "e", "f", "m", 100, 128, 8, 64, 16))
    link.on_state("ready", "")
    link.on_message(Load("e", "ready", 0.0, 3, 2, 1, 16, 64, 9, 1.5, 10, 11, 12, 13, 14, 15, 16, 2.5))
    page = samples(metrics.page((), "")[0])
    assert page["headrace:engine_up", ENGINE_0] == 1
    assert page["headrace:num_requests_running", ENGINE_0] == 3
    assert page["headrace:kv_cache_usage_perc", ENGINE_0] == 0.25
    assert page["headrace:prefix_cache_hits_total", ENGINE_0] == 14
    link.on_state("lost", "no heartbeat")
    page = samples(metrics.page((), "")[0])
    assert page["headrace:engine_up", ENGINE_0] == 0
    assert ("headrace:num_requests_running", ENGINE_0) not in page


def test_accepted_drafts_are_shown_by_position() -> None:
    metrics, dispatcher, _ = make_metrics()
    counts = (10, 11, 12, 13, 14, 15, 16, 2.5, 0.5, 4, 6, 18, (5, 3, 1))
    dispatcher.engines[0].on_message(Load("e", "ready", 0.0, 3, 2, 1, 16, 64, 9, 1.5, *counts))
    page = samples(metrics.page((), "")[0])
    assert page["headrace:spec_decode_steps_total", ENGINE_0] == 4
    assert page["headrace:spec_decode_num_drafts_total", ENGINE_0] == 6
    assert page["headrace:spec_decode_num_draft_tokens_total", ENGINE_0] == 18
    assert page["headrace:spec_decode_num_accepted_tokens_total", ENGINE_0] == 9
    by_place = "headrace:spec_decode_num_accepted_tokens_per_pos_total"
    assert [count for (name, _), count in page.items() if name == by_place] == [5, 3, 1]


def test_use_is_counted_by_key_over_all_engines() -> None:
    """The label is the key's digest; a server without keys has one, `none`."""
    metrics, dispatcher, _ = make_metrics(engines=2)
    one, two = (link.stats for link in dispatcher.engines)
    one.on_finished("stop", "d1", Usage(3, 1, 2, 0.01, 0.02, 0.03, 0, 250.0), 0.5)
    two.on_finished("abort", "d1", Usage(5, 0, 4, 0.01, 0.02, 0.03, 0, 500.0), 0.5)
    two.on_finished("stop", "", Usage(7, 2, 1, 0.01, 0.02, 0.03, 0, 125.0), 0.5)
    page = samples(metrics.page((), "")[0])

    def of(key: str) -> list[float]:
        labels = (("api_key", key), ("model_name", "m"))
        names = ("generations", "prompt_tokens", "cached_tokens", "output_tokens", "gpu_seconds")
        return [page[f"headrace:key_{name}_total", labels] for name in names]

    assert of("d1") == [2, 8, 1, 6, 0.75]
    assert of("none") == [1, 7, 2, 1, 0.125]


def test_buckets_are_cumulative_and_bounds_inclusive() -> None:
    metrics, dispatcher, _ = make_metrics()
    buckets = dispatcher.engines[0].stats.inter_token
    buckets.observe(0.005, 3)
    buckets.observe(0.3)
    buckets.observe(1000.0)
    page = samples(metrics.page((), "")[0])
    name = "headrace:inter_token_latency_seconds"
    counts = {
        le: page[f"{name}_bucket", tuple(sorted([*ENGINE_0, ("le", le)]))]
        for le in ("0.0025", "0.005", "0.2", "0.3", "80.0", "+Inf")
    }
    assert counts == {"0.0025": 0, "0.005": 3, "0.2": 3, "0.3": 4, "80.0": 4, "+Inf": 5}
    assert page[f"{name}_count", ENGINE_0] == 5
    assert page[f"{name}_sum", ENGINE_0] == pytest.approx(1000.315)


def test_openmetrics_is_served_to_who_asks_for_it() -> None:
    page, content_type = make_metrics()[0].page((), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert page.endswith(b"# EOF\n")


def test_a_tally_survives_json() -> None:
    metrics, dispatcher, worker = make_metrics()
    dispatcher.engines[0].stats.inter_token.observe(0.1, 7)
    worker.on_response("GET", "/health", 200)
    tally = metrics.tally()
    assert Tally.from_json(tally.to_json()) == tally


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"counters": 1}', b'{"counters": [["a"]]}', b"\xff"])
def test_what_is_no_tally_is_refused(data: bytes) -> None:
    with pytest.raises(TallyError):
        Tally.from_json(data)


async def test_any_worker_shows_the_sum_of_all(tmp_path: Path) -> None:
    workers = [make_metrics() for _ in range(3)]
    peers = [Peers(tmp_path, i, 3, metrics.tally) for i, (metrics, _, _) in enumerate(workers)]
    for index, (_, dispatcher, worker) in enumerate(workers):
        worker.on_response("POST", "/v1/completions", 200)
        dispatcher.engines[0].stats.inter_token.observe(0.1, 10**index)
    for peer in peers:
        await peer.start()
    try:
        for (metrics, _, _), peer in zip(workers, peers, strict=True):
            page = samples(metrics.page(await peer.ask(), "")[0])
            labels = (("method", "POST"), ("route", "/v1/completions"), ("status", "200"))
            assert page["headrace:http_requests_total", labels] == 3
            assert page["headrace:inter_token_latency_seconds_count", ENGINE_0] == 111
            assert page["headrace:workers_up", ()] == 3
    finally:
        for peer in peers:
            await peer.close()


async def test_sums_do_not_fall_when_a_worker_dies_and_comes_back(tmp_path: Path) -> None:
    first, second = make_metrics(), make_metrics()
    peer = Peers(tmp_path, 0, 2, first[0].tally)
    doomed = Peers(tmp_path, 1, 2, second[0].tally)
    await doomed.start()
    second[2].on_response("GET", "/", 200)
    labels = (("method", "GET"), ("route", "/"), ("status", "200"))

    async def shown() -> tuple[float, float]:
        page = samples(first[0].page(await peer.ask(), "")[0])
        return page["headrace:http_requests_total", labels], page["headrace:workers_up", ()]

    assert await shown() == (1, 2)
    await doomed.close()
    socket_path(tmp_path, 1).unlink(missing_ok=True)
    assert await shown() == (1, 1)

    reborn = make_metrics(load_tally(tmp_path, 1))
    reborn[2].on_response("GET", "/", 200)
    back = Peers(tmp_path, 1, 2, reborn[0].tally)
    await back.start()
    try:
        assert await shown() == (2, 2)
    finally:
        await back.close()


async def test_a_corrupt_file_of_a_dead_worker_is_left_out(tmp_path: Path) -> None:
    metrics, _, _ = make_metrics()
    (tmp_path / "worker-1.tally").write_bytes(b"\x00 half")
    assert await Peers(tmp_path, 0, 2, metrics.tally).ask() == []
