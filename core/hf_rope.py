"""The rotary part of a config.json: `rope_theta` + `rope_scaling` (transformers 4) or `rope_parameters` (5).

Called by core/hf_config.py.
"""

import math

from headrace.core.model_spec import RopeSpec, YarnSpec
from headrace.core.typed_keys import Keys, UnsupportedModel

KINDS = ("default", "linear", "yarn")


def parse_rope(keys: Keys, dim: int, *, interleaved: bool) -> tuple[RopeSpec, Keys]:
    """The RopeSpec, and the section it was read from for what only some families use."""
    if dim % 2:
        raise UnsupportedModel(f"rotary dimension {dim} is odd")
    raw = Keys({})
    for section in ("rope_parameters", "rope_scaling"):
        if keys.present(section):
            raw = keys.child(section)
            break
    kind = raw.choice("rope_type" if raw.present("rope_type") else "type", KINDS, "default")
    theta = raw.number("rope_theta", default=keys.number("rope_theta", default=10000.0))
    raw.require("partial_rotary_factor", 1.0, default=keys.number("partial_rotary_factor", default=1.0))
    spec = RopeSpec(
        dim=dim,
        theta=theta,
        interleaved=interleaved,
        linear_factor=raw.number("factor") if kind == "linear" else 1.0,
        yarn=_yarn(keys, raw) if kind == "yarn" else None,
    )
    return spec, raw


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Attention temperature of YaRN (arXiv 2309.00071, 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(keys: Keys, raw: Keys) -> YarnSpec:
    longest = keys.positive("max_position_embeddings")
    original = raw.positive("original_max_position_embeddings", default=longest)
    factor = raw.number("factor", default=longest / original)
    mscale, all_dim = raw.number("mscale", default=0.0), raw.number("mscale_all_dim", default=0.0)
    both = mscale > 0 and all_dim > 0
    scale = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim) if both else yarn_mscale(factor)
    return YarnSpec(
        factor=factor,
        original_max_position=original,
        beta_fast=raw.number("beta_fast", default=32.0),
        beta_slow=raw.number("beta_slow", default=1.0),
        cos_sin_scale=raw.number("attention_factor", default=scale),
        truncate=raw.flag("truncate", default=True),
    )
