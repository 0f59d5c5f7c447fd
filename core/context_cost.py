"""What attending to one token of context costs beside computing one query token, from a model's shapes alone.

Counts multiplications as the checkpoint's formulas have them; how a kernel arranges them is not its concern.
core/build.py gives the figure to core/charges.py.
"""

from headrace.core.model_spec import GqaSpec, MlaSpec, ModelSpec


def context_cost(spec: ModelSpec) -> float:
    """Multiplications of one query token with one token of context, over those of the query token's own weights."""
    attention = spec.attention
    per_pair = _pair(attention)
    weights = _projections(attention, spec.hidden_size) * spec.num_layers
    for sparse in spec.moe_layers:
        weights += 3 * spec.hidden_size * _active_width(spec, sparse=sparse)
    return per_pair * spec.num_layers / weights


def _pair(attention: MlaSpec | GqaSpec) -> int:
    """Of one layer: every head's score and its share of the value."""
    if isinstance(attention, MlaSpec):
        return attention.num_heads * (attention.nope_dim + attention.rope_dim + attention.v_dim)
    return attention.num_heads * 2 * attention.head_dim


def _projections(attention: MlaSpec | GqaSpec, hidden: int) -> int:
    """Weights of one attention layer."""
    heads = attention.num_heads
    if isinstance(attention, GqaSpec):
        return 2 * hidden * (heads + attention.num_kv_heads) * attention.head_dim
    query = heads * (attention.nope_dim + attention.rope_dim)
    rank = attention.q_lora_rank
    queries = hidden * query if rank is None else hidden * rank + rank * query
    latent = hidden * attention.latent_dim
    expanded = attention.kv_lora_rank * heads * (attention.nope_dim + attention.v_dim)
    return queries + latent + expanded + heads * attention.v_dim * hidden


def _active_width(spec: ModelSpec, *, sparse: bool) -> int:
    """Inner width of the feed-forward layer that one token meets."""
    if not sparse or spec.moe is None:
        return spec.intermediate_size
    return spec.moe.router.top_k * spec.moe.intermediate_size + spec.moe.shared_size
