"""A decoder whose result for a token depends on that token and its context alone, bit by bit.

On a card every operation has one shape of tiles for any number of rows; on a CPU, whose libraries have none, each
token is computed by itself. Wraps core/models/decoder.py's weights; built by core/build.py for `--deterministic`.
"""

import torch
from torch import Tensor

from headrace.core.batch import Batch
from headrace.core.models.ffn import DenseFfn, SparseFfn
from headrace.core.models.gqa import GqaAttention
from headrace.core.models.mla import MlaAttention
from headrace.core.models.step import Step, begin_step
from headrace.core.models.wrapped import WrappedDecoder
from headrace.kernels.fixed import attention_fixed, experts_fixed, heads_fixed, linear_fixed, route_fixed
from headrace.kernels.mla_kv_write import mla_kv_write
from headrace.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.rope import rope
from headrace.kernels.silu_mul import silu_mul


class InvariantDecoder(WrappedDecoder):
    """Implements core/models/base.py's Model over a decoder's weights."""

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """See Model.forward."""
        decoder = self._decoder
        if not kv.is_cuda:
            return torch.cat([decoder.forward(token, kv) for token in _tokens(batch)])
        step = begin_step(batch, kv, decoder.rope_table, decoder.spec)
        residual = decoder.embedding.index_select(0, batch.token_ids)
        for layer, cache in zip(decoder.layers, kv[: len(decoder.layers)].unbind(0), strict=True):
            x = rms_norm(residual, layer.input_norm)
            if isinstance(layer.attention, MlaAttention):
                _add_mla(layer.attention, x, residual, step, cache)
            else:
                _add_gqa(layer.attention, x, residual, step, cache)
            _add_ffn(layer.ffn, rms_norm(residual, layer.post_norm), residual)
        return residual

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See Model.logits."""
        decoder = self._decoder
        if not hidden.is_cuda:
            return torch.cat([decoder.logits(row) for row in hidden.split(1)])
        return linear_fixed(rms_norm(hidden, decoder.norm), decoder.head).float()


def _tokens(batch: Batch) -> list[Batch]:
    """Each query token as a step of its own, in order: a row's later tokens find the earlier ones' KV."""
    starts: list[int] = batch.query_starts.tolist()
    ends: list[int] = batch.context_lens.tolist()
    one = batch.query_starts.new_tensor([0, 1])
    tokens = []
    for row, end in enumerate(ends):
        for at in range(starts[row], starts[row + 1]):
            length = end - (starts[row + 1] - 1 - at)
            tokens.append(
                Batch(
                    token_ids=batch.token_ids[at : at + 1],
                    positions=batch.positions[at : at + 1],
                    slot_mapping=batch.slot_mapping[at : at + 1],
                    query_starts=one,
                    context_lens=batch.context_lens.new_tensor([length]),
                    block_tables=batch.block_tables[row : row + 1],
                    num_decodes=1,
                    max_query_len=1,
                    max_context_len=length,
                )
            )
    return tokens


def _add_gqa(weights: GqaAttention, x: Tensor, residual: Tensor, step: Step, cache: Tensor) -> None:
    qkv = linear_fixed(x, weights.qkv)
    q = qk_norm_rope_kv_write(
        qkv, weights.q_norm, weights.k_norm, step.rotation, step.slots, cache, weights.interleaved
    )
    heads = attention_fixed(q, cache[0], cache[1], step.plan, weights.spec.scale)
    linear_fixed(heads.flatten(1), weights.out, residual)


def _add_mla(weights: MlaAttention, x: Tensor, residual: Tensor, step: Step, cache: Tensor) -> None:
    s = weights.spec
    projected = linear_fixed(x, weights.down)
    q, kv_a = projected.split_with_sizes((projected.shape[1] - s.latent_dim, s.latent_dim), 1)
    mla_kv_write(kv_a, weights.kv_norm, step.rotation, step.slots, cache, weights.interleaved)
    if weights.q_norm is not None and weights.q_up is not None:
        q = linear_fixed(rms_norm(q, weights.q_norm), weights.q_up)
    q = q.view(-1, s.num_heads, s.nope_dim + s.rope_dim)
    turned = rope(q[..., s.nope_dim :], step.rotation, weights.interleaved)
    queries = torch.cat((heads_fixed(q[..., : s.nope_dim], weights.up.key), turned), 2)
    keys = cache.unsqueeze(2)
    latent = attention_fixed(queries, keys, keys[..., : s.kv_lora_rank], step.plan, s.scale)
    linear_fixed(heads_fixed(latent, weights.up.value).flatten(1), weights.out, residual)


def _add_ffn(weights: DenseFfn | SparseFfn, x: Tensor, residual: Tensor) -> None:
    if isinstance(weights, DenseFfn):
        _add_dense(weights, x, residual)
        return
    r = weights.router
    ids, scales = route_fixed(
        x, weights.gate, weights.bias, r.top_k, r.num_groups, r.topk_groups, r.normalize, r.weight_scale
    )
    for expert in weights.shared:
        _add_dense(expert, x, residual)
    experts_fixed(x, weights.routed, ids, scales, residual)


def _add_dense(weights: DenseFfn, x: Tensor, residual: Tensor) -> None:
    linear_fixed(silu_mul(linear_fixed(x, weights.gate_up)), weights.down, residual)
