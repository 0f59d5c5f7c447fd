"""From flags to runs: which sessions, which loads, how long. Knows no result; cli.py carries a plan out."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from headrace.loadtest.arrivals import ClosedLoop, Load, OpenLoop
from headrace.loadtest.conversation import Asking
from headrace.loadtest.driver import Limits
from headrace.loadtest.slo import Slo, parse_slo
from headrace.loadtest.traces import BadTrace, Trace, read_trace
from headrace.loadtest.words import TokenRate
from headrace.loadtest.workload import ChatShape, Lengths, Session, chats, independent

DEFAULT_S = 30.0
DEFAULT_USERS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What a command line asks for."""

    arguments: argparse.Namespace
    trace: Trace | None
    slo: Slo
    asking: Asking
    limits: Limits

    @staticmethod
    def of(arguments: argparse.Namespace) -> "Plan":
        """Read the trace, check what belongs together.

        Raises:
            ConfigError: the SLO or the trace cannot be used.
        """
        trace = None if arguments.trace is None else read_trace(arguments.trace)
        if arguments.trace_times and trace is not None and not trace.timed:
            raise BadTrace(f"trace {arguments.trace} has no times; give --rate or --users")
        # Until its end, a trace's own times say how long it takes.
        default = inf if arguments.requests or arguments.trace_times else DEFAULT_S
        return Plan(
            arguments,
            trace,
            parse_slo(arguments.slo) if arguments.slo else Slo(),
            Asking(arguments.api, arguments.temperature, not arguments.stop_at_eos),
            Limits(
                duration_s=arguments.duration or default,
                requests=arguments.requests,
                warmup_s=arguments.warmup,
                drain_s=arguments.drain,
                max_open=arguments.max_open,
            ),
        )

    def loads(self) -> list[Load]:
        """The loads to hold, one after the other; for --find-rate, rates are asked for one by one."""
        arguments = self.arguments
        if arguments.sweep:
            name, levels = arguments.sweep
            return [
                self.at_rate(level) if name == "rate" else ClosedLoop(int(level), arguments.ramp)
                for level in levels
            ]
        if arguments.rate or arguments.trace_times:
            return [self.at_rate(arguments.rate or 0.0)]
        return [ClosedLoop(arguments.users or DEFAULT_USERS, arguments.ramp)]

    def at_rate(self, rate: float) -> OpenLoop:
        """An open loop; 0 = the trace's own times."""
        return OpenLoop(rate, self.arguments.gap_shape, self.arguments.speed, self.arguments.seed)

    def sessions(self, rate: TokenRate, run: int) -> Iterator[Session]:
        """What users say in run number `run`: new words in each, so that no run finds another's in a cache."""
        arguments = self.arguments
        seed = arguments.seed * 1009 + run
        if self.trace is not None:
            return (
                self.trace.sessions(rate, seed) if arguments.trace_times else self.trace.endless(rate, seed)
            )
        prompt, output = arguments.prompt_tokens, arguments.output_tokens
        if arguments.workload == "independent":
            return independent(prompt, output, rate, seed)
        shape = ChatShape(
            groups=arguments.groups,
            system_tokens=arguments.system_tokens,
            turns=arguments.turns,
            think_s=arguments.think,
        )
        return chats(shape, prompt, output, rate, seed)

    def workload(self) -> str:
        """For people."""
        arguments = self.arguments
        if self.trace is not None:
            return f"{self.trace.kind} trace {arguments.trace.name}, {len(self.trace.entries)} entries"
        lengths = f"{_of(arguments.prompt_tokens)} in, {_of(arguments.output_tokens)} out"
        if arguments.workload == "independent":
            return f"independent requests, tokens: {lengths}"
        return (
            f"chats of {arguments.turns} turns, {arguments.groups} system prompts of {arguments.system_tokens} tokens, "
            f"think time {arguments.think:g} s, tokens a turn: {lengths}"
        )


def _of(lengths: Lengths) -> str:
    if not lengths.variation:
        return f"{lengths.mean:g}"
    return f"lognormal, mean {lengths.mean:g}, cv {lengths.variation:g}"
