"""What a synthetic engine pretends to be: its limits, its speed, its tokens."""

import hashlib
from dataclasses import dataclass

from headrace.ipc.messages import PROTOCOL_VERSION, Welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticOptions:
    """A step takes `step_ms` + `token_ms` x the query tokens in it; with both 0 it runs as fast as it can."""

    token_ids: tuple[int, ...]  # the tokens it chooses from
    step_ms: float = 0.0
    token_ms: float = 0.0
    tokens_per_row: int = 1  # output tokens of a row and step, as speculation makes them; at most 255
    engine: str = "engine-0"
    model: str = "synthetic"
    vocab_size: int = 32768
    max_model_len: int = 32768
    max_num_seqs: int = 4096
    max_num_batched_tokens: int = 1 << 20
    max_waiting: int = 16384
    num_blocks: int = 1 << 20
    block_size: int = 16

    def welcome(self) -> Welcome:
        """What the engine says of itself. Engines with the same tokens and limits are interchangeable."""
        kind = repr((self.token_ids, self.vocab_size, self.max_model_len)).encode()
        return Welcome(
            version=PROTOCOL_VERSION,
            engine=self.engine,
            fingerprint=f"synthetic-{hashlib.sha256(kind).hexdigest()[:16]}",
            model=self.model,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
        )
