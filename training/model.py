"""The model as it is trained: a trunk of MLA and expert layers, and one MTP module applied again and again.

export.py knows how its tensors are called in Hugging Face's deepseek_v3 layout; decode.py generates with it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.attention import Attention, LatentCache, Rotary, rotary_table
from training.experts import Experts, FeedForward
from training.shape import Shape

MTP_DEPTH = 2
"""How often the MTP module is applied in training; depth k predicts the token after the next k."""
TEACHER = 0.5
"""The share of an MTP depth's loss that imitates the trunk's own prediction; the rest is the text's next token."""


class Losses(NamedTuple):
    """Mean nats per token."""

    main: Tensor  # scalar, against the text
    mtp: Tensor  # [MTP_DEPTH], against the text
    imitation: Tensor  # [MTP_DEPTH], cross-entropy against the trunk's distribution


class Block(nn.Module):
    """Attention and feed-forward layer, each on the normalised residual stream."""

    def __init__(self, shape: Shape, *, dense: bool) -> None:
        """dense: a plain feed-forward layer in place of experts."""
        super().__init__()
        self.input_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.attention = Attention(shape)
        self.post_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mlp = FeedForward(shape.hidden, shape.dense_size) if dense else Experts(shape)

    def forward(self, x: Tensor, rotary: Rotary, cache: LatentCache | None = None) -> Tensor:
        """x [B, T, hidden] -> the same shape."""
        x = x + self.attention(self.input_norm(x), rotary, cache)
        out: Tensor = x + self.mlp(self.post_norm(x))
        return out


class Mtp(nn.Module):
    """Multi-token prediction: a hidden state and the next token's embedding -> the hidden state one token on."""

    def __init__(self, shape: Shape) -> None:
        """The projection takes [embedding; hidden], DeepSeek's order."""
        super().__init__()
        self.embedding_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.projection = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.block = Block(shape, dense=False)
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)

    def forward(
        self, hidden: Tensor, embedded: Tensor, rotary: Rotary, cache: LatentCache | None = None
    ) -> Tensor:
        """hidden, embedded [B, T, hidden] -> [B, T, hidden], before `norm`."""
        joined = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        # the residual stream is float32 under autocast too, as in the trunk
        out: Tensor = self.block(self.projection(joined).float(), rotary, cache)
        return out


class Model(nn.Module):
    """Trunk, MTP module and the tied embedding that serves both as head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        """Initialise by torch's global random generator."""
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, dense=i < shape.dense_layers) for i in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mtp = Mtp(shape)
        # train.py puts compiled ones here
        self.text_loss, self.draft_losses = text_loss, draft_losses
        cos, sin = rotary_table(shape, shape.context + MTP_DEPTH)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Scale by fan-in; what writes into the residual stream is scaled down by depth."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue
            std = 0.02 if "embedding.weight" in name else parameter.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "mlp.down")):
                std *= (2 * self.shape.layers) ** -0.5
            nn.init.normal_(parameter, std=std)

    def rotary(self, first: int, length: int) -> Rotary:
        """Tables of positions first .. first+length-1."""
        return self.cos[first : first + length], self.sin[first : first + length]

    def trunk(self, ids: Tensor, first: int = 0, caches: Sequence[LatentCache] | None = None) -> Tensor:
        """ids [B, T] at positions from `first` -> hidden [B, T, hidden] before the final norm."""
        x: Tensor = self.embedding(ids)
        rotary = self.rotary(first, ids.shape[1])
        for i, block in enumerate(self.blocks):
            x = block(x, rotary, None if caches is None else caches[i])
        return x

    def draft(self, hidden: Tensor, ids: Tensor, first: int = 0, cache: LatentCache | None = None) -> Tensor:
        """hidden [B, T, hidden] of positions from `first` and the tokens after them -> hidden of one token on."""
        out: Tensor = self.mtp(hidden, self.embedding(ids), self.rotary(first, ids.shape[1]), cache)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """The trunk's prediction: [..., hidden] -> [..., vocab]."""
        return F.linear(self.norm(hidden), self.embedding.weight)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """The MTP module's prediction: [..., hidden] -> [..., vocab]."""
        return F.linear(self.mtp.norm(hidden), self.embedding.weight)

    def losses(self, ids: Tensor) -> Losses:
        """ids [B, T + 1 + MTP_DEPTH]; all depths are T wide so that one compiled block serves them all."""
        length = ids.shape[1] - 1 - MTP_DEPTH
        hidden = self.trunk(ids[:, :length])
        logits = self.logits(hidden)
        main = self.text_loss(logits, ids[:, 1 : length + 1])
        texts, imitations = [], []
        for depth in range(1, MTP_DEPTH + 1):
            hidden = self.draft(hidden, ids[:, depth : length + depth])
            text, imitation = self.draft_losses(
                self.draft_logits(hidden), ids[:, depth + 1 : length + depth + 1], logits.detach(), depth
            )
            texts.append(text)
            imitations.append(imitation)
        return Losses(main, torch.stack(texts), torch.stack(imitations))

    def experts(self) -> list[Experts]:
        """All expert layers, the MTP module's last."""
        return [module for module in self.modules() if isinstance(module, Experts)]


def text_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy: logits [B, T, V], targets [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def draft_losses(logits: Tensor, targets: Tensor, teacher: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """A depth's loss against the text, and against the trunk's distribution `depth` positions on, all [B, T, V].

    Acceptance asks for the trunk's choice, not the author's. The last `depth` positions have no teacher.
    """
    log_p = logits.float().log_softmax(-1)
    text = -log_p.gather(-1, targets.unsqueeze(-1)).mean()
    aim = teacher.float().softmax(-1).roll(-depth, 1)
    imitation = -(aim * log_p).sum(-1)[:, :-depth].mean()
    return text, imitation
