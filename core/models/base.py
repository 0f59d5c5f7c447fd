"""The surface of a model, as the runner and the speculation code see it. Legend: docs/architecture.md.

A model owns its weights and nothing that changes from step to step; the KV pool comes in as an argument.
Implemented by core/models/decoder.py, built by core/weights.py.
"""

from typing import Protocol

import torch
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.model_spec import ModelSpec


class MtpHead(Protocol):
    """Guesses the token after next from the hidden state: multi-token prediction (arXiv 2412.19437, 2.2), EAGLE."""

    @property
    def num_modules(self) -> int: ...

    def features(self, hidden: Tensor) -> Tensor:
        """[T, D] that Model.forward returned -> [T, D] that `forward` takes at the first depth."""
        ...

    def forward(self, batch: Batch, hidden: Tensor, kv: Tensor, *, module: int = 0) -> Tensor:
        """Run one module; its KV goes to the pool's layer `num_layers + module`.

        Args:
            batch: position i holds the token that FOLLOWS the one `hidden[i]` was computed from, at the
                position of that earlier token. So the pair (hidden of position p, token of p + 1) sits at p.
            hidden: [T, D], `features` of what Model.forward returned, or this method's result for the depth before.
            kv: the pool, made with `kv_shape(..., mtp=True)`.

        Returns:
            [T, D]; `logits` of it predicts the token two after the one `hidden[i]` was computed from.
        """
        ...

    def logits(self, hidden: Tensor, *, module: int = 0) -> Tensor:
        """[S, D] of `forward` -> [S, V] float32."""
        ...


class Model(Protocol):
    """A decoder over the paged KV pool."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, hidden states and the KV pool."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def mtp(self) -> MtpHead | None:
        """None where the checkpoint has no such module."""
        ...

    def kv_shape(self, num_blocks: int, block_size: int, *, mtp: bool = False) -> tuple[int, ...]:
        """Shape of the KV pool. See ModelSpec.kv_shape."""
        ...

    def kv_bytes_per_block(self, block_size: int, dtype: torch.dtype, *, mtp: bool = False) -> int:
        """Bytes that one block takes in all layers together."""
        ...

    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """Write the KV of all T tokens, attend, and return the hidden states.

        Returns:
            [T, D] before the final norm: `logits` norms the rows it is given, and MTP wants them like this.
        """
        ...

    def forward_rows(self, batch: Batch, kv: Tensor, rows: Tensor) -> Tensor:
        """`forward` for those who want some rows only: the last layer may spare itself the others.

        Args:
            rows: [S] int64 of the T query tokens, at least one.

        Returns:
            [S, D].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, D] rows of `forward` -> [S, V] float32, final norm included."""
        ...
