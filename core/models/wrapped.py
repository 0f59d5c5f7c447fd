"""What decoders that compute another way have in common: the weights, shape and drafter of a plain one.

Half of core/models/base.py's Model; `forward` and `logits` are the wrapper's own. Extended by
core/models/compiled.py and core/models/invariant.py.
"""

import torch
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.model_spec import ModelSpec
from headrace.core.models.base import MtpHead
from headrace.core.models.decoder import Decoder


class WrappedDecoder:
    """Everything of a decoder that does not depend on how it computes."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @property
    def spec(self) -> ModelSpec:
        return self._decoder.spec

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.dtype

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    @property
    def mtp(self) -> MtpHead | None:
        """The decoder's own: how a guess was computed decides nothing but whether it is right."""
        return self._decoder.mtp

    def kv_shape(self, num_blocks: int, block_size: int, *, mtp: bool = False) -> tuple[int, ...]:
        return self._decoder.kv_shape(num_blocks, block_size, mtp=mtp)

    def kv_bytes_per_block(self, block_size: int, dtype: torch.dtype, *, mtp: bool = False) -> int:
        return self._decoder.kv_bytes_per_block(block_size, dtype, mtp=mtp)

    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """See Model.forward."""
        raise NotImplementedError

    def forward_rows(self, batch: Batch, kv: Tensor, rows: Tensor) -> Tensor:
        """See Model.forward_rows."""
        return self.forward(batch, kv).index_select(0, rows)
