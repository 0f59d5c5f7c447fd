"""What the machine allows, for one loaded model: the least time of a decode step, a prefill, a trace.

Measures bandwidth and product rate once, in the run that they are compared with. Called by engine.py.
"""

from collections.abc import Sequence

from headrace.core.bench.ceiling import StepBytes, copy_bandwidth, step_bytes
from headrace.core.bench.flops import attention_flops, parameters, product_flops, product_rate
from headrace.core.bench.workload import DecodeShape, PrefillShape, Trace
from headrace.core.models.base import Model

FP8_WEIGHT_BYTES = 1 + 4 / 128**2  # a scale of four bytes for each block


class Yardstick:
    """Ceilings in milliseconds; None where the operations of this device have no known rate.

    Args:
        model: loaded, idle.
        fp8: its products are.
    """

    def __init__(self, model: Model, *, fp8: bool) -> None:
        self.bandwidth = copy_bandwidth(model.device)  # bytes per second, read plus written
        self.rate = product_rate(model.device, fp8=fp8)  # operations per second
        # Attention stays in the model's dtype.
        self._attention_rate = self.rate if not fp8 else product_rate(model.device, fp8=False)
        self._spec = model.spec
        self._parameters = parameters(model.spec)
        self._weight_bytes = FP8_WEIGHT_BYTES if fp8 else float(model.dtype.itemsize)
        self._kv_bytes = model.kv_bytes_per_block(1, model.dtype)

    def decode(self, batch: int, shape: DecodeShape) -> float:
        """One step: the bytes that it must read."""
        return self._step(batch, _mean_context(shape))

    def decode_bytes(self, batch: int, shape: DecodeShape) -> StepBytes:
        """The same by part."""
        return self._bytes(batch, _mean_context(shape))

    def prefill(self, shape: PrefillShape) -> float | None:
        """The operations of all prompts."""
        return self._prompts([shape.tokens] * shape.prompts)

    def trace(self, trace: Trace) -> float | None:
        """Of the ideal order of work: all prompts first, then all answers together, each until its end."""
        prompts = self._prompts(trace.prompts)
        if prompts is None:
            return None
        total = prompts
        for position in range(1, max(trace.outputs)):
            contexts = [
                prompt + position
                for prompt, output in zip(trace.prompts, trace.outputs, strict=True)
                if output > position
            ]
            total += self._step(len(contexts), sum(contexts) / len(contexts))
        return total

    def _step(self, batch: int, context: float) -> float:
        return self._bytes(batch, context).total / self.bandwidth * 1e3

    def _bytes(self, batch: int, context: float) -> StepBytes:
        return step_bytes(self._spec, self._parameters, batch, context, self._weight_bytes, self._kv_bytes)

    def _prompts(self, lengths: Sequence[int]) -> float | None:
        if self.rate is None or self._attention_rate is None:
            return None
        products = product_flops(self._spec, self._parameters, sum(lengths), len(lengths))
        attention = attention_flops(self._spec, lengths)
        return (products / self.rate + attention / self._attention_rate) * 1e3


def _mean_context(shape: DecodeShape) -> float:
    return shape.mean_prompt + (shape.few + shape.many) / 2
