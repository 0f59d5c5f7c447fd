"""What is exported is what was trained, and what transformers reads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.training.tiny import TINY, make_model
from training.export import dequantise, export, hf_config, load_export, quantise, shape_of
from training.shape import FULL, SMALL, Shape


def test_fp8_blocks_come_back_within_their_precision() -> None:
    weight = torch.randn(200, 130)
    stored, scales = quantise(weight)
    assert stored.shape == weight.shape
    assert scales.shape == (2, 2)
    # e4m3 keeps three bits behind the leading one
    torch.testing.assert_close(dequantise(stored, scales), weight, rtol=2**-4, atol=0.01)


def test_an_export_read_back_is_the_same_model(tmp_path: Path) -> None:
    """Once in fp8 the weights are fixed points: a second export is bit for bit the first."""
    export(make_model(), tmp_path / "a")
    once = load_export(tmp_path / "a")
    export(once, tmp_path / "b")
    twice = load_export(tmp_path / "b")
    ids = torch.randint(0, TINY.vocab, (2, 20))
    assert torch.equal(once.logits(once.trunk(ids)), twice.logits(twice.trunk(ids)))
    assert torch.equal(once.draft(once.trunk(ids), ids), twice.draft(twice.trunk(ids), ids))
    stored = once.state_dict()
    for name, original in make_model().state_dict().items():
        assert (stored[name] - original).norm() <= 0.04 * original.norm(), name


def test_exports_are_sharded_by_the_index(tmp_path: Path) -> None:
    export(make_model(), tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {path.name for path in tmp_path.glob("*.safetensors")} == set(index["weight_map"].values())
    assert f"model.layers.{TINY.layers}.eh_proj.weight" in index["weight_map"]
    assert "model.layers.1.mlp.experts.7.up_proj.weight_scale_inv" in index["weight_map"]


@pytest.mark.parametrize("shape", [FULL, SMALL, TINY], ids=["full", "small", "tiny"])
def test_the_shape_is_in_config_json(shape: Shape) -> None:
    assert shape_of(json.loads(json.dumps(hf_config(shape)))) == shape


def wide_copy(folder: Path, target: Path) -> Path:
    """The folder's weights without fp8, which transformers reads on any device."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    tensors = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    wide = {
        name: dequantise(tensor, tensors[f"{name}_scale_inv"]) if f"{name}_scale_inv" in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }
    save_file(wide, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_exported_logits_equal_transformers(small_path: Path, tmp_path: Path) -> None:
    """Hugging Face's DeepseekV3 reads the layout as we mean it: same logits from the same file."""
    theirs = AutoModelForCausalLM.from_pretrained(wide_copy(small_path, tmp_path), dtype=torch.float32)
    theirs.train(False)
    ours = load_export(small_path)
    ids = torch.randint(0, ours.shape.vocab, (1, 40), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = theirs(ids).logits
        torch.testing.assert_close(ours.logits(ours.trunk(ids)), expected, rtol=1e-3, atol=2e-3)
