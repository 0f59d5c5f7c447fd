"""The metrics page: one worker's tally, the engines' newest heartbeats, and both as a Prometheus collector.

Knows no HTTP and no files: peers.py brings the other workers' tallies, health.py serves the page.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from headrace.gateway.buckets import Buckets
from headrace.gateway.dispatcher import Dispatcher
from headrace.gateway.families import COUNTED, PREFIX, REPORTED, Family
from headrace.gateway.link import EngineLink
from headrace.gateway.stats import WorkerStats
from headrace.gateway.tally import Tally

NO_KEY = "none"  # label of a server without keys


class Metrics:
    """Everything one worker has to say to Prometheus.

    Args:
        model: the `model_name` label.
        dispatcher: whose engines are shown.
        worker: what this worker counts outside its engines.
        base: what an earlier process of this worker had counted; its gauges are ignored.
    """

    def __init__(
        self, model: str, dispatcher: Dispatcher, worker: WorkerStats, base: Tally | None = None
    ) -> None:
        self._model = model
        self._dispatcher = dispatcher
        self._worker = worker
        self._base = Tally(base.counters, base.histograms) if base else Tally()

    def tally(self) -> Tally:
        """This worker's numbers as of now."""
        tally = Tally()
        tally.add(self._base)
        for link in self._dispatcher.engines:
            self._count_engine(tally, link)
        worker = self._worker
        for (method, route, status), count in worker.http_requests.items():
            tally.count(count, "http_requests", method, route, status)
        for code, count in worker.refused_frames.items():
            tally.count(count, "websocket_refused_frames", code)
        tally.count(worker.slow_streams, "slow_streams")
        tally.count(worker.websockets, "websocket_connections")
        tally.gauge(self._dispatcher.num_streams, "open_streams")
        tally.gauge(worker.open_websockets, "open_websockets")
        tally.gauge(1, "workers_up")
        return tally

    def page(self, others: Iterable[Tally], accept: str) -> tuple[bytes, str]:
        """The text of the page and its content type, for this worker and `others` together."""
        total = self.tally()
        for tally in others:
            total.add(tally)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Page(total, self._reported()))
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    def _count_engine(self, tally: Tally, link: EngineLink) -> None:
        stats, labels = link.stats, (self._model, str(link.index))
        histograms: tuple[tuple[str, Buckets], ...] = (
            ("time_to_first_token_seconds", stats.time_to_first),
            ("inter_token_latency_seconds", stats.inter_token),
            ("e2e_request_latency_seconds", stats.e2e),
            ("request_queue_time_seconds", stats.queue),
            ("request_prefill_time_seconds", stats.prefill),
            ("request_decode_time_seconds", stats.decode),
        )
        for name, buckets in histograms:
            tally.histogram(buckets.counts, buckets.total, name, *labels)
        tally.count(stats.prompt_tokens, "prompt_tokens", *labels)
        tally.count(stats.cached_tokens, "prompt_tokens_cached", *labels)
        tally.count(stats.generation_tokens, "generation_tokens", *labels)
        tally.count(stats.lost, "requests_lost", *labels)
        tally.count(stats.late_tokens, "late_tokens", *labels)
        tally.count(stats.listener_errors, "listener_errors", *labels)
        for tenant, use in stats.keys.items():
            key = (self._model, tenant or NO_KEY)
            tally.count(use.generations, "key_generations", *key)
            tally.count(use.prompt_tokens, "key_prompt_tokens", *key)
            tally.count(use.cached_tokens, "key_cached_tokens", *key)
            tally.count(use.output_tokens, "key_output_tokens", *key)
            tally.count(use.gpu_s, "key_gpu_seconds", *key)
        for reason, count in stats.finished.items():
            tally.count(count, "request_success", *labels, reason)
        for code, count in stats.rejected.items():
            tally.count(count, "request_rejected", *labels, code)

    def _reported(self) -> Tally:
        tally = Tally()
        for link in self._dispatcher.engines:
            labels = (self._model, str(link.index))
            tally.gauge(link.state == "ready", "engine_up", *labels)
            load = link.load
            if load is None:
                continue
            tally.gauge(load.running, "num_requests_running", *labels)
            tally.gauge(load.waiting, "num_requests_waiting", *labels)
            tally.gauge(load.parked, "num_requests_parked", *labels)
            tally.gauge(load.blocks_used / max(1, load.num_blocks), "kv_cache_usage_perc", *labels)
            tally.gauge(load.step_ms, "engine_step_time_ms", *labels)
            tally.count(load.prefix_queries, "prefix_cache_queries", *labels)
            tally.count(load.prefix_hits, "prefix_cache_hits", *labels)
            tally.count(load.preemptions, "num_preemptions", *labels)
            tally.count(load.prompt_tokens, "engine_prompt_tokens", *labels)
            tally.count(load.output_tokens, "engine_output_tokens", *labels)
            tally.count(load.step, "engine_steps", *labels)
            tally.count(load.busy_s, "engine_busy_seconds", *labels)
            tally.count(load.overhead_s, "engine_overhead_seconds", *labels)
            tally.count(load.refused_frames, "engine_refused_frames", *labels)
            tally.count(load.draft_steps, "spec_decode_steps", *labels)
            tally.count(load.draft_rows, "spec_decode_num_drafts", *labels)
            tally.count(load.drafted, "spec_decode_num_draft_tokens", *labels)
            tally.count(sum(load.accepted), "spec_decode_num_accepted_tokens", *labels)
            for place, count in enumerate(load.accepted):
                tally.count(count, "spec_decode_num_accepted_tokens_per_pos", *labels, str(place))
        return tally


class _Page(Collector):
    """Turns tallies into prometheus_client's families, once per scrape."""

    def __init__(self, counted: Tally, reported: Tally) -> None:
        self._counted = counted
        self._reported = reported

    def collect(self) -> Iterator[Metric]:
        for families, tally in ((COUNTED, self._counted), (REPORTED, self._reported)):
            for family in families:
                yield _metric(family, tally)


def _metric(family: Family, tally: Tally) -> Metric:
    name = PREFIX + family.name
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.text, labels=family.labels)
        for key, value in tally.histograms.items():
            if key[0] == family.name:
                histogram.add_metric(key[1:], _cumulative(family.bounds, value.counts), value.total)
        return histogram
    metric: CounterMetricFamily | GaugeMetricFamily
    if family.kind == "counter":
        metric, values = CounterMetricFamily(name, family.text, labels=family.labels), tally.counters
    else:
        metric, values = GaugeMetricFamily(name, family.text, labels=family.labels), tally.gauges
    for key, number in values.items():
        if key[0] == family.name:
            metric.add_metric(key[1:], number)
    return metric


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Prometheus wants each bucket to hold all the smaller ones, and `+Inf` last."""
    names = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))
