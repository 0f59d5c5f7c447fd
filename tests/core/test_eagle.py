"""An EAGLE head against a plain transcription, its folder's refusals, and greedy output with it over a real engine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from headrace.config import (
    CacheConfig,
    Config,
    ConfigError,
    EngineConfig,
    ModelConfig,
    SpeculationConfig,
)
from headrace.core.build import build
from headrace.core.eagle_checkpoint import attach_eagle
from headrace.core.models.decoder import Decoder
from headrace.core.models.eagle import Eagle
from headrace.core.weights import load_model
from headrace.ipc.messages import Sampling
from tests.core.engines import generate, load, make_engine
from tests.core.hf_models import save_tiny
from tests.core.ragged import Row, error_of_scale, make_batch, make_pool, make_tables, random_tokens

HIDDEN, HEADS, KV_HEADS, DIM, VOCAB, INNER = 64, 6, 2, 16, 96, 40
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "hidden_act": "silu",
}


def make_tensors(seed: int = 0, scale: float = 0.15) -> dict[str, Tensor]:
    """A random head, by the published names, with copies of what it shares with its model."""
    generator = torch.Generator().manual_seed(seed)
    layer = "layers.0."
    shapes = {
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "fc.bias": (HIDDEN,),
        "embed_tokens.weight": (VOCAB, HIDDEN),
        f"{layer}self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
        f"{layer}self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
        f"{layer}self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{layer}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, INNER),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
    }
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}


def save_head(folder: Path, tensors: dict[str, Tensor], **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE of random weights."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny("qwen3_moe", folder)
    return folder


@pytest.fixture
def model(model_path: Path) -> Decoder:
    loaded = load(model_path)
    assert isinstance(loaded, Decoder)
    return loaded


def plain(tensors: dict[str, Tensor], model: Decoder, following: list[int], features: Tensor) -> Tensor:
    """The head over one sequence without a cache: the next features [T, D]."""

    def get(name: str) -> Tensor:
        return tensors[f"layers.0.{name}.weight"]

    count = len(following)
    embedded = model.embedding[torch.tensor(following)]
    x = torch.cat((embedded, features), -1) @ tensors["fc.weight"].T + tensors["fc.bias"]
    q, k, v = (
        (x @ get(f"self_attn.{name}_proj").T + tensors.get(f"layers.0.self_attn.{name}_proj.bias", 0.0))
        .view(count, -1, DIM)
        .transpose(0, 1)
        for name in "qkv"
    )
    frequencies = 50000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    angles = torch.arange(count)[:, None] * frequencies
    q, k = (turn(part, angles) for part in (q, k))
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (k, v))
    scores = q @ k.transpose(1, 2) / DIM**0.5
    scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf"))
    x = x + (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1) @ get("self_attn.o_proj").T
    normed = F.rms_norm(x, (HIDDEN,), get("post_attention_layernorm"), 1e-5)
    gate, up = normed @ get("mlp.gate_proj").T, normed @ get("mlp.up_proj").T
    guessed: Tensor = x + (F.silu(gate) * up) @ get("mlp.down_proj").T
    return guessed


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the halves of the last dimension."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1)


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_a_head_equals_a_plain_transcription(model: Decoder, tmp_path: Path, qkv_bias: bool) -> None:
    """In chunks over the pool, then one token on its own guess."""
    tensors = make_tensors()
    if qkv_bias:
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"layers.0.self_attn.{name}_proj.bias"] = torch.randn(rows * DIM)
    attach_eagle(save_head(tmp_path / "head", tensors, qkv_bias=qkv_bias), model)
    assert isinstance(model.mtp, Eagle)
    tokens, table = random_tokens(0, 41, VOCAB), make_tables(0, 1, 11)[0]
    kv = make_pool(model, 12, mtp=True)
    hidden = model.forward(make_batch([Row(tokens[:-1], 0, table)]), kv)
    features = model.mtp.features(hidden)
    cut = 23
    guessed = torch.cat(
        [
            model.mtp.forward(make_batch([Row(tokens[a + 1 : b + 1], a, table)]), features[a:b], kv)
            for a, b in [(0, cut), (cut, 40)]
        ]
    )
    expected = plain(tensors, model, tokens[1:], features)
    assert error_of_scale(guessed, expected) < 1e-5
    assert error_of_scale(model.mtp.logits(guessed), expected @ model.head.T) < 1e-5
    further = model.mtp.forward(make_batch([Row([7], 40, table)]), guessed[-1:], kv)
    expected = plain(tensors, model, [*tokens[1:], 7], torch.cat((features, expected[-1:])))
    assert error_of_scale(further, expected[-1:]) < 1e-5


def test_features_are_what_the_models_own_head_reads(model: Decoder, tmp_path: Path) -> None:
    attach_eagle(save_head(tmp_path / "head", make_tensors()), model)
    assert model.mtp is not None
    hidden = torch.randn(5, HIDDEN)
    assert torch.allclose(model.mtp.logits(model.mtp.features(hidden)), model.logits(hidden), atol=1e-5)


def repeating_tensors() -> dict[str, Tensor]:
    """A head that guesses the newest feature again: right wherever the model repeats itself."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors().items()}
    tensors["fc.weight"][:, HIDDEN:] = torch.eye(HIDDEN)
    return tensors


@pytest.mark.parametrize("kind", ["random", "repeating"])
@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
def test_tokens_with_a_head_are_the_plain_tokens(
    model: Decoder, model_path: Path, tmp_path: Path, kind: str, sampling: str
) -> None:
    rules = Sampling(max_tokens=40, temperature=0.0)
    if sampling == "seeded":
        rules = replace(rules, temperature=0.7, top_p=0.9, seed=5, seeded=True)
    prompts = [random_tokens(i, 3 + 4 * i, VOCAB) for i in range(12)]
    expected = generate(make_engine(model, model_path), prompts, rules)
    tensors = make_tensors() if kind == "random" else repeating_tensors()
    attach_eagle(save_head(tmp_path / "head", tensors), model)
    drafting = SpeculationConfig(drafters="mtp", draft_tokens=3)
    engine = make_engine(model, model_path, max_num_batched_tokens=48, speculation=drafting)
    assert generate(engine, prompts, rules) == expected
    assert engine.speculator is not None
    assert engine.speculator.counters.drafted > 0
    if kind == "repeating" and sampling == "greedy":
        assert sum(engine.speculator.counters.accepted) > 10


def test_the_configured_head_is_the_engines_drafter(model_path: Path, tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", make_tensors())
    config = Config(
        model=ModelConfig(path=str(model_path), device="cpu"),
        cache=CacheConfig(num_blocks=64),
        engine=EngineConfig(threads=1),
        speculation=SpeculationConfig(drafters="mtp", model=str(head)),
    )
    assert isinstance(build(config.resolve()).model.mtp, Eagle)


def test_a_configured_folder_without_a_head_is_refused_at_once(model_path: Path, tmp_path: Path) -> None:
    config = Config(
        model=ModelConfig(path=str(model_path)), speculation=SpeculationConfig(model=str(tmp_path))
    )
    with pytest.raises(ConfigError, match=r"speculation\.model"):
        config.resolve()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"draft_vocab_size": 50}, "EAGLE-3"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3"),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, "DFlash"),
        ({"model_type": "mixtral"}, "mixtral"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"hidden_size": 80}, "hidden_size"),
        ({"vocab_size": 97}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 8}, "head_dim"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"intermediate_size": 41}, "gate_proj"),
        ({"bias": False}, r"fc\.bias"),
        ({"qkv_bias": True}, r"q_proj\.bias"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    model: Decoder, tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        attach_eagle(save_head(tmp_path / "head", make_tensors(), **changed), model)
    assert model.mtp is None


def test_a_model_of_latents_is_refused(small_path: Path, tmp_path: Path) -> None:
    model = load_model(small_path, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(model, Decoder)
    with pytest.raises(ConfigError, match="latents"):
        attach_eagle(save_head(tmp_path / "head", make_tensors()), model)


def test_a_folder_of_pickled_weights_is_refused(model: Decoder, tmp_path: Path) -> None:
    """Most heads were published as pytorch_model.bin, which is never opened."""
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError):
        attach_eagle(folder, model)
