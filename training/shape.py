"""The sizes of the model, and the two that were trained. Knows no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A DeepSeek-V3-style model: MLA without query compression, grouped sigmoid routing, one shared expert, MTP."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 7
    dense_layers: int = 1  # the first ones have a plain feed-forward layer
    dense_size: int = 1024
    heads: int = 8
    nope_dim: int = 32  # of a head, without position
    rope_dim: int = 16  # of a head, with rotary position
    value_dim: int = 32
    latent_dim: int = 64  # of the compressed keys and values
    experts: int = 16
    top_k: int = 4
    expert_size: int = 128
    shared_size: int = 256
    groups: int = 4
    top_groups: int = 2
    context: int = 2048
    rope_theta: float = 10000.0
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope_dim


FULL = Shape()
SMALL = Shape(
    hidden=128,
    layers=5,
    dense_size=512,
    heads=4,
    latent_dim=48,
    experts=8,
    top_k=2,
    expert_size=64,
    shared_size=128,
    groups=1,
    top_groups=1,
    context=256,
)
