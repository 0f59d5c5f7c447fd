"""A step on its way to the host: what it chose, read back without waiting for the step behind it.

Made by `execute`, waited for by `commit`. Knows no request.
"""

import torch
from torch import Tensor

from headrace.core.sampler import LogprobRows, Sampled


class Launched:
    """What a queued step will have chosen.

    On a card the copies to pinned memory are queued at once, so `read` waits for this step only, however many
    come behind it.

    Args:
        sampled: on the device; None where no row of the step sampled.
    """

    def __init__(self, sampled: Sampled | None) -> None:
        self._tokens: Tensor | None = None
        self._logprobs: LogprobRows | None = None
        self._ready: torch.cuda.Event | None = None
        if sampled is None:
            return
        self._tokens = _to_host(sampled.tokens)
        if sampled.logprobs is not None:
            found = sampled.logprobs
            self._logprobs = LogprobRows(
                found.rows, _to_host(found.chosen), _to_host(found.top_ids), _to_host(found.top)
            )
        if sampled.tokens.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()

    def read(self) -> tuple[list[int], LogprobRows | None]:
        """Wait, then: the token of each sampling row, and the log-probabilities that were asked for."""
        if self._tokens is None:
            return [], None
        if self._ready is not None:
            self._ready.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens, self._logprobs


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
