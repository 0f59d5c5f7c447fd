"""Multi-token prediction against a plain transcription of DeepSeek's module, and by what it is worth."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from headrace.core.models.base import Model
from headrace.core.safetensors_index import open_checkpoint
from headrace.core.weights import load_model
from headrace.kernels.fp8_block import fp8_block_dequantize_ref
from tests.core.ragged import (
    Row,
    error_of_scale,
    make_batch,
    make_pool,
    make_tables,
    random_tokens,
)

PROMPTS = [
    "Tell me a story about a brave mouse who finds an old map.",
    "What is 12 + 7?",
    "What is the capital of France?",
    "Give me three tips to sleep better.",
    "Write a short story about Mia the fox.",
    "I feel sad because my friend moved away.",
]
ANSWER_TOKENS = 60


@pytest.fixture(scope="module")
def embedded(embedded_path: Path) -> Model:
    return load_model(embedded_path, dtype=torch.float32, device=torch.device("cpu"))


def test_module_equals_a_plain_transcription(embedded: Model, embedded_path: Path) -> None:
    """Including the pair's order (embedding before hidden state) and the KV of its own layer."""
    assert embedded.mtp is not None and embedded.mtp.num_modules == 1
    tokens = random_tokens(0, 41, embedded.spec.vocab_size)
    table = make_tables(0, 1, 11)[0]
    kv = make_pool(embedded, 12, mtp=True)
    hidden = embedded.forward(make_batch([Row(tokens[:-1], 0, table)]), kv)
    cut = 23
    drafts = [
        embedded.mtp.forward(make_batch([Row(tokens[a + 1 : b + 1], a, table)]), hidden[a:b], kv)
        for a, b in [(0, cut), (cut, 40)]
    ]
    found = embedded.mtp.logits(torch.cat(drafts))
    expected = _Plain(embedded_path)(tokens[1:], hidden)
    assert error_of_scale(found, expected) < 1e-5


def test_greedy_chat_answers_are_mostly_drafted_right(embedded: Model, embedded_path: Path) -> None:
    """The training measured 0.74 at depth 1; a wrong order or a wrong norm gives next to nothing."""
    tokenizer = Tokenizer.from_file(str(embedded_path / "tokenizer.json"))
    texts = [f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" for prompt in PROMPTS]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    hits, drafted = _acceptance(embedded, prompts)
    assert drafted > 150
    assert hits / drafted > 0.6


def _acceptance(model: Model, prompts: list[list[int]]) -> tuple[int, int]:
    """Generate greedily, then draft every next-but-one token of the answers: (right, drafted)."""
    assert model.mtp is not None
    tables = make_tables(0, len(prompts), 30)
    kv = make_pool(model, len(prompts) * 30 + 1, mtp=True)
    tokens = [list(prompt) for prompt in prompts]
    states = [
        model.forward(make_batch([Row(t, 0, table)]), kv) for t, table in zip(tokens, tables, strict=True)
    ]
    for _ in range(ANSWER_TOKENS):
        chosen = model.logits(torch.cat([state[-1:] for state in states])).argmax(-1).tolist()
        for sequence, token in zip(tokens, chosen, strict=True):
            sequence.append(token)
        rows = [Row(t[-1:], len(t) - 1, table) for t, table in zip(tokens, tables, strict=True)]
        step = model.forward(make_batch(rows), kv)
        states = [torch.cat((state, new)) for state, new in zip(states, step.split(1), strict=True)]
    right = []
    for prompt, sequence, state, table in zip(prompts, tokens, states, tables, strict=True):
        drafted = model.mtp.forward(make_batch([Row(sequence[1:], 0, table)]), state[:-1], kv)
        guesses = model.mtp.logits(drafted).argmax(-1).tolist()
        answer = sequence[len(prompt) :]
        end = next((i for i, token in enumerate(answer) if token in model.spec.eos_token_ids), len(answer))
        first, last = len(prompt) + 1, min(len(prompt) + end + 1, len(sequence))
        right += [guesses[at - 2] == sequence[at] for at in range(first, last)]
    return sum(right), len(right)


class _Plain:
    """One MTP module as DeepSeek describes it: expanded heads, every expert computed, no cache."""

    def __init__(self, path: Path) -> None:
        with open_checkpoint(path) as checkpoint:
            self.weights = {}
            for name, info in checkpoint.tensors.items():
                if name.endswith("_scale_inv"):
                    continue
                weight = checkpoint.read(name)
                if info.dtype == "F8_E4M3":
                    weight = fp8_block_dequantize_ref(
                        weight, checkpoint.read(name + "_scale_inv"), torch.float32
                    )
                self.weights[name] = weight.float().clone()
        self.prefix = "model.layers.7."

    def __call__(self, following: list[int], hidden: Tensor) -> Tensor:
        embedded = self.weights["model.embed_tokens.weight"][torch.tensor(following)]
        pair = torch.cat((self.norm(embedded, "enorm"), self.norm(hidden, "hnorm")), -1)
        x = pair @ self.get("eh_proj").T
        x = x + self.attention(self.norm(x, "input_layernorm"))
        x = x + self.experts(self.norm(x, "post_attention_layernorm"))
        return self.norm(x, "shared_head.norm") @ self.weights["model.embed_tokens.weight"].T

    def get(self, name: str) -> Tensor:
        return self.weights[f"{self.prefix}{name}.weight"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.get(name), 1e-6)

    def attention(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        q = (x @ self.get("self_attn.q_proj").T).view(count, 8, 48)
        latent, key = (x @ self.get("self_attn.kv_a_proj_with_mqa").T).split((64, 16), -1)
        up = self.norm(latent, "self_attn.kv_a_layernorm") @ self.get("self_attn.kv_b_proj").T
        k_nope, v = up.view(count, 8, 64).split(32, -1)
        k = torch.cat((k_nope, _rotate(key[:, None]).expand(-1, 8, -1)), -1)
        q = torch.cat((q[..., :32], _rotate(q[..., 32:])), -1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / 48**0.5
        future = torch.ones(count, count, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1) @ self.get("self_attn.o_proj").T

    def experts(self, x: Tensor) -> Tensor:
        scores = (x @ self.get("mlp.gate").T).sigmoid()
        choice = scores + self.weights[f"{self.prefix}mlp.gate.e_score_correction_bias"]
        groups = choice.view(-1, 4, 4).topk(2, -1).values.sum(-1).topk(2, -1).indices
        opened = torch.zeros(len(x), 4).scatter(1, groups, 1.0).repeat_interleave(4, 1).bool()
        chosen = choice.masked_fill(~opened, float("-inf")).topk(4, -1).indices
        gates = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        gates = gates / gates.sum(-1, keepdim=True)
        out = self.swiglu(x, "mlp.shared_experts")
        for expert in range(16):
            out = out + gates[:, expert, None] * self.swiglu(x, f"mlp.experts.{expert}")
        return out

    def swiglu(self, x: Tensor, name: str) -> Tensor:
        gate, up = x @ self.get(f"{name}.gate_proj").T, x @ self.get(f"{name}.up_proj").T
        return (F.silu(gate) * up) @ self.get(f"{name}.down_proj").T


def _rotate(x: Tensor) -> Tensor:
    """[T, N, 16] at positions 0..T - 1, neighbouring pairs."""
    frequencies = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    angles = (torch.arange(x.shape[0])[:, None] * frequencies)[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    turned: Any = (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos())
    return torch.stack(turned, -1).flatten(-2)
