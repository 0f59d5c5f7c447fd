"""All that one command measures on one engine: each workload timed, laid beside its ceiling and its peer.

Makes the records; prints nothing. Called by engine.py after the correctness check.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.config import Config
from headrace.core.bench.arguments import BenchPlan
from headrace.core.bench.published import PEER, Workload, published
from headrace.core.bench.record import EngineRecord, card, commit, versions
from headrace.core.bench.step_profile import StepProfile, profile_steps
from headrace.core.bench.transformers_peer import load_peer, time_peer
from headrace.core.bench.workload import (
    DecodeShape,
    PrefillShape,
    StepTimes,
    Trace,
    enter_decode,
    leave_decode,
    make_requests,
    run_requests,
    time_decode,
    time_prefill,
    time_trace,
)
from headrace.core.bench.yardstick import Yardstick
from headrace.core.build import Built

PROFILED_STEPS = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """A record, and what its profile's kernels must read, by kind."""

    record: EngineRecord
    bytes_of: Mapping[str, float]


class Measurement:
    """Times workloads on one engine.

    Args:
        plan: what to measure.
        config: the engine's.
        built: idle.
        yardstick: of its model.
    """

    def __init__(self, plan: BenchPlan, config: Config, built: Built, yardstick: Yardstick) -> None:
        self._plan = plan
        self._config = config
        self._built = built
        self._yardstick = yardstick
        self._engine = built.engine
        self._vocab_size = built.model.spec.vocab_size

    def run(self, trace: Trace | None) -> Iterator[Measured]:
        """Yield one result after the other, decodes first."""
        transformers = self._transformers() if self._plan.transformers else None
        for batch in self._plan.batches:
            yield self._decode(batch, transformers if batch == 1 else None)
        for shape in self._plan.prefills:
            yield self._prefill(shape)
        if trace is not None:
            yield self._trace(trace)

    def _decode(self, batch: int, transformers: float | None) -> Measured:
        shape, engine, plan = self._plan.decode, self._engine, self._plan
        times = time_decode(engine, self._vocab_size, batch, shape, plan.repeats)
        profile = self._profile_decode(batch) if plan.profile else None
        size = self._yardstick.decode_bytes(batch, shape)
        workload = self._workload("decode", batch, shape.mean_prompt, shape.many)
        record = self._record(
            workload,
            times,
            tokens=batch,
            ceiling_ms=self._yardstick.decode(batch, shape),
            profile=profile,
            transformers=transformers,
            comparable=shape == DecodeShape(),
        )
        return Measured(record, {"experts": size.experts, "dense products": size.dense, "attention": size.kv})

    def _prefill(self, shape: PrefillShape) -> Measured:
        times = time_prefill(self._engine, self._vocab_size, shape, self._plan.repeats)
        profile = profile_steps(lambda: self._prefill_once(shape)) if self._plan.profile else None
        record = self._record(
            self._workload("prefill", shape.prompts, shape.tokens, 1),
            times,
            tokens=shape.prompts * shape.tokens,
            ceiling_ms=self._yardstick.prefill(shape),
            profile=profile,
        )
        return Measured(record, {})

    def _trace(self, trace: Trace) -> Measured:
        times = time_trace(self._engine, self._vocab_size, trace, self._plan.repeats)
        count, prompts, outputs = len(trace.prompts), sum(trace.prompts), sum(trace.outputs)
        record = self._record(
            self._workload("mixed", count, prompts / count, outputs / count),
            times,
            tokens=prompts + outputs,
            outputs=outputs,
            ceiling_ms=self._yardstick.trace(trace),
        )
        return Measured(record, {})

    def _record(
        self,
        workload: Workload,
        times: StepTimes,
        *,
        tokens: int,
        ceiling_ms: float | None,
        outputs: int | None = None,
        profile: StepProfile | None = None,
        transformers: float | None = None,
        comparable: bool = True,
    ) -> EngineRecord:
        device, speed = self._built.model.device, tokens / times.median * 1e3
        name = card(device)
        peer, of_peer = "", None
        if transformers is not None:
            peer, of_peer = "transformers", transformers
        elif comparable and (found := published(workload, name)) is not None:
            peer, of_peer = PEER, found
        return EngineRecord(
            bench=workload.bench,
            model=workload.model,
            dtype=workload.dtype,
            batch=workload.batch,
            prompt_tokens=workload.prompt_tokens,
            output_tokens=workload.output_tokens,
            speculate=self._speculate(),
            step_ms=times.median,
            step_ms_spread=(times.smallest, times.largest),
            tokens_per_s=speed,
            output_tokens_per_s=None if outputs is None else outputs / times.median * 1e3,
            ceiling_ms=ceiling_ms,
            of_ceiling=None if ceiling_ms is None else ceiling_ms / times.median,
            peer=peer,
            peer_tokens_per_s=of_peer,
            ratio=None if of_peer is None else speed / of_peer,
            profile=profile,
            card=name,
            threads=0 if device.type == "cuda" else torch.get_num_threads(),
            versions=versions(),
            commit=self._plan.commit or commit(),
        )

    def _workload(self, bench: str, batch: int, prompt_tokens: float, output_tokens: float) -> Workload:
        dtype = str(self._built.model.dtype).removeprefix("torch.")
        return Workload(
            bench=bench,
            model=self._config.model.served_name,
            dtype=self._config.model.quantization or dtype,
            batch=batch,
            prompt_tokens=round(prompt_tokens),
            output_tokens=round(output_tokens),
        )

    def _speculate(self) -> str:
        acceptance = self._plan.acceptance
        return self._config.speculation.drafters if acceptance is None else f"synthetic:{acceptance:g}"

    def _profile_decode(self, batch: int) -> StepProfile:
        requests = enter_decode(self._engine, self._vocab_size, batch, self._plan.decode)

        def steps() -> int:
            for _ in range(PROFILED_STEPS):
                self._engine.step()
            return PROFILED_STEPS

        found = profile_steps(steps)
        leave_decode(self._engine, requests)
        return found

    def _prefill_once(self, shape: PrefillShape) -> int:
        before = self._engine.clock.steps
        lengths, outputs = [shape.tokens] * shape.prompts, [1] * shape.prompts
        run_requests(self._engine, make_requests(lengths, outputs, self._vocab_size, seed=78))
        return self._engine.clock.steps - before

    def _transformers(self) -> float:
        """Tokens per second of Hugging Face's code on the same weights, prompts and threads, at batch 1."""
        peer = load_peer(Path(self._config.model.path))
        return 1e3 / time_peer(peer, self._vocab_size, self._plan.decode, self._plan.repeats).median
