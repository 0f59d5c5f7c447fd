"""The steps that an engine on a card runs before its first user comes, so that none of his compiles a kernel.

Recorded steps compiled theirs while they were recorded; here come those that are launched kernel by kernel, and the
sampler's rules. Knows an engine by its public methods alone. Called by core/build.py.
"""

from collections.abc import Sequence

from headrace.core.engine import Engine
from headrace.core.memory_profile import DEMANDING
from headrace.core.prompt_graphs import LARGEST, LONG_ROWS
from headrace.core.request import Request
from headrace.ipc.messages import Sampling

# More prompts than a recorded step has places for: short ones, then rows of attention's large tiles. Odd lengths, for
# kernels may have a variant for multiples of 16.
CROWDS = ((LONG_ROWS + 1, 3), (LONG_ROWS + 1, 7), (LONG_ROWS + 1, 17))
FIRST_TOKEN = Sampling(max_tokens=1, temperature=0.0)


def warm_up_card(
    engine: Engine, max_num_seqs: int, max_num_batched_tokens: int, *, recorded: bool = True
) -> None:
    """Run steps of every kind, alone and beside decodes. The engine is idle before and after.

    Args:
        recorded: small prompts are replayed; else prompts of every size are launched, whose tiles differ.
    """
    longest = engine.scheduler.max_model_len - 2
    largest = min(max_num_batched_tokens, longest)
    crowds = [[length] * min(count, max_num_seqs) for count, length in CROWDS if length <= longest]
    # Alone: more tokens than a recorded step holds, an odd number. Beside decodes: chunks over earlier ones.
    alone: list[Sequence[int]] = [[min(LARGEST + 33, largest)], *crowds]
    mixed: list[Sequence[int]] = [[min(2 * largest, longest)], *crowds[-1:]]
    if not recorded:
        powers = [1 << n for n in range(4, largest.bit_length())]
        sizes = [[length] for power in powers for length in (power, power + 1) if length <= largest]
        alone += sizes
        mixed += [*crowds, *sizes]
    for beside, steps in ((0, alone), (min(2, max_num_seqs - 1), mixed)):
        running = [_request(f"beside {row}", 5, Sampling(max_tokens=longest - 5)) for row in range(beside)]
        for request in running:
            engine.submit(request)
        for number, lengths in enumerate(steps):
            _run(engine, [_request(f"{beside} {number} {i}", n, FIRST_TOKEN) for i, n in enumerate(lengths)])
        for request in running:
            engine.cancel(request.request_id)
            engine.charges.waive(request)
    _run(engine, [_request(f"rules {i}", 5, DEMANDING) for i in range(min(3, max_num_seqs))])
    while engine.has_work:
        engine.step()


def _run(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.submit(request)
    while not all(request.finished for request in requests):
        engine.step()
    for request in requests:
        engine.charges.waive(request)


def _request(name: str, length: int, sampling: Sampling) -> Request:
    """Of tokens that differ, so that they do not all take the same experts."""
    ids = [(31 * i) % 256 for i in range(length)]
    return Request(f"warm-up {name}", ids, sampling, cache_salt=f"warm-up {name}")
