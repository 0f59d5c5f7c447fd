"""Keeps the logits that an engine on a card chose from, by request and position, whichever path made them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.core.build import Built


class LogitRecord:
    """Listens to an engine's recorded steps and to its model from now on.

    `rows[slot, position]` is what the token at that position of the request in that slot was chosen from.
    """

    def __init__(self, built: Built, *, eager: bool = False) -> None:
        """`eager`: no step may be replayed."""
        self.rows: dict[tuple[int, int], Tensor] = {}
        self.replayed = 0
        graphs, executor = built.parts.graphs, built.parts.executor
        assert graphs is not None, "there is no card"
        self._chosen: list[Tensor] = []
        self._replace(graphs, "run", self._replaying(graphs.run))
        if eager:
            self._replace(graphs, "fits", lambda inputs: False)
        self._replace(executor, "_model", _Listening(executor._model, self))
        self._replace(executor, "execute", self._executing(executor.execute))

    def heard(self, logits: Tensor) -> None:
        """The next step's choice was made from these."""
        self._chosen.append(logits.clone())

    def _replaying(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def replaying(inputs: Any) -> Any:
            logits, tokens = run(inputs)
            self.replayed += 1
            self.heard(logits)
            return logits, tokens

        return replaying

    def _executing(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def executing(inputs: Any) -> Any:
            self._chosen.clear()
            launched = execute(inputs)
            keys = list(zip(inputs.sample_slots.tolist(), inputs.sample_positions.tolist(), strict=True))
            if keys:
                assert self._chosen, "a step chose from logits that nobody saw"
                self.rows |= zip(keys, self._chosen[-1].unbind(0), strict=True)
            return launched

        return executing

    @staticmethod
    def _replace(owner: object, name: str, value: object) -> None:
        setattr(owner, name, value)


class _Listening:
    def __init__(self, model: object, record: LogitRecord) -> None:
        self._model = model
        self._record = record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.logits(hidden)  # type: ignore[attr-defined]
        if not torch.cuda.is_current_stream_capturing():
            self._record.heard(logits)
        return logits
