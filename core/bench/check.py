"""The correctness check that every benchmark runs first: what decoding chose, a fresh prefill must choose too.

Knows the engine only by its public methods.
"""

from headrace.core.bench.workload import DecodeShape, draw_prompts, run_all
from headrace.core.engine import Engine
from headrace.core.request import Request
from headrace.ipc.messages import Sampling

PROMPTS = 4
OUTPUTS = 16
SHAPE = DecodeShape(shortest=20, longest=60)


class WrongAnswer(RuntimeError):
    """The engine contradicts itself, so no figure of it is worth reporting."""


def check_decode(engine: Engine, vocab_size: int, tolerance: float) -> None:
    """Decode a few prompts together; recompute each position by one prefill of the whole text.

    Args:
        engine: idle.
        vocab_size: of its model.
        tolerance: how much less likely, in nats, a decoded token may be than the prefill's likeliest one:
            the rounding of two orders of summation, 0 differences being asked of no dtype.

    Raises:
        WrongAnswer: names the prompt, the position and the difference.
    """
    prompts = draw_prompts(PROMPTS, SHAPE, vocab_size, seed=12345)
    outputs = run_all(engine, prompts, OUTPUTS)
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        for position, token in enumerate(output):
            sampling = Sampling(max_tokens=1, temperature=0.0, logprobs=20)
            # The salt keeps the recomputation from finding the decoded blocks in the prefix cache.
            request = Request("check", prompt + output[:position], sampling, cache_salt=f"check {position}")
            engine.submit(request)
            found = []
            while engine.has_work:
                found += engine.step()
            (logprobs,) = found[0].logprobs
            likely = dict(zip(logprobs.top_ids, logprobs.top, strict=True))
            gap = logprobs.top[0] - likely.get(token, float("-inf"))
            if gap > tolerance:
                raise WrongAnswer(
                    f"prompt {index}, output {position}: decoding chose {token}, prefill prefers "
                    f"{logprobs.top_ids[0]} by {gap:.3g} nats (at most {tolerance:g})"
                )
