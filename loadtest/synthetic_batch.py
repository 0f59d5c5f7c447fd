"""The synthetic engine's requests: what scheduler, model and sampler are to a real engine.

Knows messages but no socket: loadtest/synthetic.py feeds it what came and sends what it makes. One step at a
time: `begin`, then `commit`.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from headrace.ipc.messages import (
    Cancel,
    Credit,
    Finished,
    Goodbye,
    Load,
    Rejected,
    Submit,
    ToEngine,
    Tokens,
    Usage,
)
from headrace.ipc.packed import int32_view
from headrace.loadtest.synthetic_options import SyntheticOptions
from headrace.loadtest.synthetic_queue import SyntheticQueue
from headrace.loadtest.synthetic_rows import Generation, Rows
from headrace.loadtest.synthetic_step import SyntheticStep, draw
from headrace.loadtest.synthetic_tokens import TokenSource


class SyntheticBatch:
    """Lock-step batches with credit, cancel, chunked prefill, priorities among the waiting, and no preemption.

    Blocks are reserved at admission for the longest a request can get, so a running one never lacks any. There
    is no prefix cache, so nothing is ever found there. Sampling counts for its seed and its stops only.

    Args:
        options: limits, speed, tokens.
        clock: seconds, monotonic.
    """

    def __init__(self, options: SyntheticOptions, clock: Callable[[], float]) -> None:
        self.draining = False
        self._options = options
        self._clock = clock
        self._source = TokenSource(options.token_ids)
        self._rows = Rows()
        self._queue = SyntheticQueue(self._rows, options.num_blocks)
        self._running = np.empty(0, np.int64)  # rows
        self._started: list[Generation] = []  # running, without a first token yet
        self._open: dict[tuple[bytes, int], Generation] = {}
        self._by_row: dict[int, Generation] = {}
        self._gateways: list[bytes] = []  # by the number in the gateway column; b"" = free
        self._done: dict[bytes, list[Finished]] = {}  # not reported yet
        self._step = 0
        self._step_s = 0.0
        self._busy_s = 0.0
        self._overhead_s = 0.0
        self._prompt_tokens = 0
        self._output_tokens = 0

    @property
    def num_open(self) -> int:
        """Streams that have not ended."""
        return len(self._open)

    def handle(self, gateway: bytes, message: ToEngine) -> Rejected | None:
        """Take one message; the answer, if there is one at once."""
        match message:
            case Submit():
                return self._submit(gateway, message)
            case Credit():
                self._grant(gateway, message)
            case Cancel():
                generation = self._open.get((gateway, message.stream))
                if generation is not None:
                    self._remove(generation)
                    self._finish(generation, "cancelled", self._clock())
            case Goodbye():
                self.drop(gateway)
            case _:
                pass
        return None

    def drop(self, gateway: bytes) -> None:
        """The gateway is gone: end its streams without a word."""
        for generation in [entry for (owner, _), entry in self._open.items() if owner == gateway]:
            self._remove(generation)
            self._close(generation)
        self._done.pop(gateway, None)
        if gateway in self._gateways:
            self._gateways[self._gateways.index(gateway)] = b""

    def begin(self) -> float | None:
        """Choose who is in the step; the seconds that it is to take, None if there is nothing to do."""
        options = self._options
        slots = options.max_num_seqs - len(self._running) - self._queue.num_prefilling
        self._run(self._queue.admit(slots, self._clock()))
        decode = len(self._running) * options.tokens_per_row
        ready, prefill = self._queue.prefill(max(0, options.max_num_batched_tokens - decode))
        self._run(ready)
        if not decode + prefill:
            return None
        self._prompt_tokens += prefill
        return (options.step_ms + options.token_ms * (decode + prefill)) / 1000

    def commit(self, elapsed_s: float) -> list[tuple[bytes, Tokens]]:
        """End the step: its tokens, one message for each gateway that has any or has ended streams.

        Args:
            elapsed_s: wall time that the step took.
        """
        self._step += 1
        self._step_s = elapsed_s
        self._busy_s += elapsed_s
        rows = self._running
        step = draw(rows, self._rows, self._by_row, self._source, self._options.tokens_per_row)
        self._rows.produced[rows] += step.counts
        if len(rows):
            # Alike for all: nothing is computed here that one stream has more of than another.
            self._rows.charged_ms[rows] += elapsed_s * 1e3 / len(rows)
        else:
            self._overhead_s += elapsed_s
        self._output_tokens += int(step.counts.sum())
        streams, owners = self._rows.stream[rows], self._rows.gateway[rows]
        messages = {
            self._gateways[owner]: step.message(self._step, streams, np.flatnonzero(owners == owner))
            for owner in np.flatnonzero(np.bincount(owners)).tolist()
        }
        self._settle(step)
        return self._with_finished(messages)

    def flush(self) -> list[tuple[bytes, Tokens]]:
        """Ended streams that no step has reported yet."""
        return self._with_finished({})

    def load(self) -> Load:
        """The figures of the moment."""
        held = np.array([row for row, entry in self._by_row.items() if entry.state != "waiting"], np.int64)
        lengths = self._rows.prompt[held] + self._rows.produced[held]
        return Load(
            engine=self._options.engine,
            state="draining" if self.draining else "ready",
            ping=0.0,
            running=len(self._running) + self._queue.num_prefilling,
            waiting=self._queue.num_waiting,
            parked=self._queue.num_parked,
            blocks_used=int((-(-lengths // self._options.block_size)).sum()),
            num_blocks=self._options.num_blocks,
            step=self._step,
            step_ms=self._step_s * 1000,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=0,
            output_tokens=self._output_tokens,
            prefix_queries=self._prompt_tokens,
            prefix_hits=0,
            preemptions=0,
            refused_frames=0,
            busy_s=self._busy_s,
            overhead_s=self._overhead_s,
        )

    def _submit(self, gateway: bytes, submit: Submit) -> Rejected | None:
        now = self._clock()
        options, sampling = self._options, submit.sampling
        prompt, generated = len(submit.prompt) // 4, len(submit.generated) // 4
        end = min(sampling.max_tokens, options.max_model_len - prompt)
        blocks = -(-(prompt + end) // options.block_size)
        problem = self._problem(gateway, submit, blocks)
        if problem is not None:
            return Rejected(submit.stream, *problem)
        stops = np.array([entry for entry in sampling.stop_token_ids if entry in self._source], np.int32)
        row, columns = self._rows.add(), self._rows
        columns.stream[row] = submit.stream
        columns.gateway[row] = self._number(gateway)
        columns.seed[row] = sampling.seed
        columns.prompt[row] = prompt
        columns.produced[row] = generated
        columns.end[row] = end
        columns.credit[row] = submit.credit
        columns.charged_ms[row] = 0.0
        columns.special[row] = len(stops) > 0 or sampling.logprobs >= 0
        generation = Generation(row, submit, gateway, blocks, stops, prompt + generated, now)
        self._open[gateway, submit.stream] = self._by_row[row] = generation
        if generated >= end:
            self._finish(generation, "length", now)
        else:
            self._queue.add(generation)
        return None

    def _problem(self, gateway: bytes, submit: Submit, blocks: int) -> tuple[str, str] | None:
        """Why the generation is not taken: code and message."""
        options = self._options
        prompt = int32_view(submit.prompt)
        if self.draining:
            return "draining", "the engine is shutting down"
        if (gateway, submit.stream) in self._open:
            return "bad_request", f"stream {submit.stream} is in use"
        if not len(prompt):
            return "bad_request", "the prompt is empty"
        if (highest := int(prompt.max())) >= options.vocab_size:
            return "bad_request", f"token id {highest} is outside the vocabulary of {options.vocab_size}"
        if len(prompt) >= options.max_model_len:
            return (
                "too_long",
                f"the prompt has {len(prompt)} tokens, the context holds {options.max_model_len}",
            )
        if blocks > options.num_blocks:
            return "too_long", f"the request needs {blocks} blocks, the pool has {options.num_blocks}"
        if self._queue.num_waiting >= options.max_waiting:
            return (
                "queue_full",
                f"{self._queue.num_waiting} requests wait, the limit is {options.max_waiting}",
            )
        return None

    def _number(self, gateway: bytes) -> int:
        """The gateway's number in the column; that of a gone one is used again."""
        if gateway not in self._gateways:
            if b"" not in self._gateways:
                self._gateways.append(b"")
            self._gateways[self._gateways.index(b"")] = gateway
        return self._gateways.index(gateway)

    def _grant(self, gateway: bytes, credit: Credit) -> None:
        generation = self._open.get((gateway, credit.stream))
        if generation is None:
            return
        row = generation.row
        self._rows.credit[row] = max(int(self._rows.credit[row]), credit.limit)
        if generation.state == "parked" and self._rows.has_credit(row):
            self._queue.unpark(generation)

    def _run(self, generations: list[Generation]) -> None:
        if not generations:
            return
        for generation in generations:
            generation.state = "running"
            if generation.first_token is None:
                self._started.append(generation)
        rows = np.array([generation.row for generation in generations], np.int64)
        self._running = np.concatenate([self._running, rows])

    def _settle(self, step: SyntheticStep) -> None:
        """After the tokens: who has ended, who is out of credit, who goes on."""
        now = self._clock()
        for generation in self._started:
            generation.first_token = now
        self._started.clear()
        columns, rows = self._rows, step.rows
        produced = columns.produced[rows]
        ended = step.stopped | (produced >= columns.end[rows])
        parked = ~ended & (produced >= columns.credit[rows])
        leaving = ended | parked
        if not leaving.any():
            return
        self._running = rows[~leaving]
        for row in rows[parked].tolist():
            self._queue.park(self._by_row[row])
        for index in np.flatnonzero(ended).tolist():
            generation = self._by_row[int(rows[index])]
            self._finish(generation, "stop" if step.stopped[index] else "length", now)

    def _remove(self, generation: Generation) -> None:
        """Take it out of whatever holds it."""
        self._queue.remove(generation)
        if generation.state == "running":
            self._running = self._running[self._running != generation.row]
            if generation in self._started:
                self._started.remove(generation)

    def _finish(self, generation: Generation, reason: str, now: float) -> None:
        """Note the end for the gateway; nothing holds the generation any more."""
        scheduled = now if generation.scheduled is None else generation.scheduled
        first_token = now if generation.first_token is None else generation.first_token
        usage = Usage(
            prompt_tokens=len(generation.submit.prompt) // 4,
            cached_tokens=0,
            output_tokens=int(self._rows.produced[generation.row]),
            queue_s=scheduled - generation.arrival,
            prefill_s=first_token - scheduled,
            decode_s=now - first_token,
            preemptions=0,
            gpu_ms=float(self._rows.charged_ms[generation.row]),
        )
        finished = Finished(generation.submit.stream, reason, usage, "")
        self._done.setdefault(generation.gateway, []).append(finished)
        self._close(generation)

    def _close(self, generation: Generation) -> None:
        self._queue.release(generation)
        del self._open[generation.gateway, generation.submit.stream]
        del self._by_row[generation.row]
        self._rows.free(generation.row)

    def _with_finished(self, messages: dict[bytes, Tokens]) -> list[tuple[bytes, Tokens]]:
        for gateway, finished in self._done.items():
            tokens = messages.get(gateway) or Tokens(self._step, b"", b"", b"", b"", (), ())
            messages[gateway] = replace(tokens, finished=tuple(finished))
        self._done.clear()
        return list(messages.items())
