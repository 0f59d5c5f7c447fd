"""Results of `headrace bench gateway` as typed records, one a line. Knows no process."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from headrace.loadtest.gateway_plan import Case, Setting
from headrace.loadtest.gateway_point import Point
from headrace.loadtest.software import commit, machine, versions

Spread = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRecord:
    """One front end under one load: medians over the rounds, spreads from the smallest to the largest."""

    bench: str  # saturate | paced | new | idle
    front: str  # headrace | fastapi | aiohttp
    workers: int
    transport: str  # sse | ws
    streams: int
    rounds: int
    tokens_per_s: float | None
    tokens_per_s_spread: Spread | None
    tokens_per_event: float | None
    cpu_us_per_token: float | None
    p50_ms: float | None  # delay that the front end added
    p99_ms: float | None
    kb_per_stream: float | None  # of memory, idle
    server_share: float | None  # of one core, its workers together
    client_share: float | None  # near 1 = the client was the limit
    engine_share: float | None
    failed: int
    ratio: float | None  # tokens/s over the peer's, paired by round; median
    ratio_spread: Spread | None
    scale: float | None  # what the workers can do over what one alone can, from their CPU per token; median
    scale_spread: Spread | None
    machine: str
    versions: Mapping[str, str]
    commit: str


def summarise(
    setting: Setting,
    case: Case,
    points: Sequence[Point],
    peers: Sequence[Point] = (),
    single: Sequence[Point] = (),
) -> GatewayRecord:
    """The record of one front end.

    Args:
        setting: the load.
        case: the front end and its transport.
        points: its measurements, by round.
        peers: of the same rounds, the peer's; none if there is no other.
        single: of the same rounds, one worker's, where this is about several.
    """
    rates = [point.tokens_per_s for point in points]
    ratios = [own / peer.tokens_per_s for own, peer in zip(rates, peers, strict=True)] if peers else []
    scales = [_scale(point, alone) for point, alone in zip(points, single, strict=True)] if single else []
    p50 = [point.delay_p50_ms for point in points if point.delay_p50_ms is not None]
    p99 = [point.delay_p99_ms for point in points if point.delay_p99_ms is not None]
    return GatewayRecord(
        bench=setting.bench,
        front=case.kind.name,
        workers=case.kind.workers,
        transport=case.transport,
        streams=setting.streams,
        rounds=len(points),
        tokens_per_s=median(rates),
        tokens_per_s_spread=(min(rates), max(rates)),
        tokens_per_event=median(point.tokens_per_event for point in points),
        cpu_us_per_token=median(point.server_us for point in points),
        p50_ms=median(p50) if p50 else None,
        p99_ms=median(p99) if p99 else None,
        kb_per_stream=None,
        server_share=median(point.server_share for point in points),
        client_share=median(point.client_share for point in points),
        engine_share=median(point.engine_share for point in points),
        failed=sum(point.failed for point in points),
        ratio=median(ratios) if ratios else None,
        ratio_spread=(min(ratios), max(ratios)) if ratios else None,
        scale=median(scales) if scales else None,
        scale_spread=(min(scales), max(scales)) if scales else None,
        machine=machine(),
        versions=versions(),
        commit=commit(),
    )


def _scale(workers: Point, alone: Point) -> float:
    """How much more the workers can do than one alone: when the busiest is full, at the CPU that a token costs each."""
    return alone.server_us / (workers.server_us * workers.busiest)


def idle_record(setting: Setting, case: Case, sizes: Sequence[float]) -> GatewayRecord:
    """Memory of idle streams, bytes each, by round."""
    return GatewayRecord(
        bench="idle",
        front=case.kind.name,
        workers=case.kind.workers,
        transport=case.transport,
        streams=setting.streams,
        rounds=len(sizes),
        tokens_per_s=None,
        tokens_per_s_spread=None,
        tokens_per_event=None,
        cpu_us_per_token=None,
        p50_ms=None,
        p99_ms=None,
        kb_per_stream=median(sizes) / 1024,
        server_share=None,
        client_share=None,
        engine_share=None,
        failed=0,
        ratio=None,
        ratio_spread=None,
        scale=None,
        scale_spread=None,
        machine=machine(),
        versions=versions(),
        commit=commit(),
    )


def append(path: Path, record: GatewayRecord) -> None:
    """Add one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")
