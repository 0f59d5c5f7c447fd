"""Loading: every defect is named, every layout of files gives the same model, dummy weights are the same anywhere."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.config import LoadFormat
from headrace.core import dummy
from headrace.core.dummy import DummySource
from headrace.core.hf_config import read_spec
from headrace.core.models.base import Model
from headrace.core.safetensors_index import INDEX_FILE, CheckpointError, index_tensors, open_checkpoint
from headrace.core.tensor_source import take
from headrace.core.weights import fingerprint, load_model, needed_shapes
from tests.core.ragged import random_tokens, whole

CPU = torch.device("cpu")
GOLDEN = [-0.023666564375162125, -0.030167819932103157, 0.01044178195297718, 0.04806475713849068]
SHARD = "model-00001-of-00001.safetensors"
DOWN = "model.layers.2.mlp.experts.5.down_proj.weight"


def load(path: Path, *, load_format: LoadFormat = "safetensors", seed: int = 0) -> Model:
    return load_model(path, dtype=torch.float32, device=CPU, load_format=load_format, seed=seed)


def logits(model: Model) -> Tensor:
    return whole(model, random_tokens(0, 12, model.spec.vocab_size))


@pytest.fixture
def folder(small_path: Path, tmp_path: Path) -> Path:
    """A copy of the small model that may be spoilt."""
    target = tmp_path / "model"
    shutil.copytree(small_path, target, ignore=shutil.ignore_patterns("tokenizer*"))
    return target


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors, and leave one file without an index."""
    tensors = load_file(folder / SHARD)
    change(tensors)
    (folder / INDEX_FILE).unlink()
    save_file(tensors, folder / SHARD)


def set_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_every_file_layout_gives_the_same_model(small_path: Path, folder: Path, tmp_path: Path) -> None:
    expected = logits(load(small_path))
    rewrite(folder, lambda tensors: None)
    assert torch.equal(logits(load(folder)), expected)
    tensors = load_file(folder / SHARD)
    (folder / SHARD).unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for part in range(3):
        file = f"part-{part}.safetensors"
        save_file({name: tensors[name] for name in names[part::3]}, folder / file)
        weight_map |= dict.fromkeys(names[part::3], file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits(load(folder)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_unquantised_files_load(dtype: torch.dtype, folder: Path, small_path: Path) -> None:
    def dequantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            scale, weight = tensors.pop(name), name.removesuffix("_scale_inv")
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            rows, columns = tensors[weight].shape
            tensors[weight] = tensors[weight].float() * wide[:rows, :columns]
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(dtype)

    rewrite(folder, dequantise)
    expected = logits(load(small_path))
    error = (logits(load(folder)) - expected).abs().max() / expected.abs().max()
    assert error < {torch.float32: 1e-6, torch.float16: 5e-3, torch.bfloat16: 5e-2}[dtype]


def test_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(DOWN))
    with pytest.raises(CheckpointError, match=r"1 tensors missing: .*experts\.5\.down_proj\.weight"):
        load(folder)


def test_missing_scale_of_an_fp8_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(DOWN + "_scale_inv"))
    with pytest.raises(CheckpointError, match=r"missing: .*experts\.5\.down_proj\.weight_scale_inv"):
        load(folder)


def test_unexpected_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(3)}))
    with pytest.raises(
        CheckpointError, match=r"1 tensors unexpected: model\.layers\.0\.self_attn\.q_proj\.bias"
    ):
        load(folder)


def test_misshaped_tensor_is_named_with_both_shapes(folder: Path) -> None:
    def transpose(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1].contiguous()

    rewrite(folder, transpose)
    expected = r"misshaped: model\.embed_tokens\.weight \(expected \[4096, 128\], found \[4095, 128\]\)"
    with pytest.raises(CheckpointError, match=expected):
        load(folder)


def test_unsupported_dtype_is_named(folder: Path) -> None:
    def to_int8(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)

    rewrite(folder, to_int8)
    with pytest.raises(CheckpointError, match=r"unsupported dtype: model\.norm\.weight \(I8\)"):
        load(folder)


def test_many_defects_are_counted_and_the_first_shown(folder: Path) -> None:
    set_config(folder, num_hidden_layers=9, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"\d+ tensors missing: .* and \d+ more"):
        load(folder)


def test_absent_mtp_module_is_not_an_error_but_half_of_one_is(folder: Path) -> None:
    """Tools that re-save a model drop the module and leave the config's count."""
    tensors = load_file(folder / SHARD)
    last = [name for name in tensors if name.startswith("model.layers.5.")]
    rewrite(folder, lambda kept: [kept.pop(name) for name in last])
    model = load(folder)
    assert model.mtp is None and model.spec.num_mtp == 0
    save_file({k: v for k, v in tensors.items() if "eh_proj" not in k}, folder / SHARD)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.5\.eh_proj\.weight"):
        load(folder)


def test_copies_of_shared_tensors_are_ignored(folder: Path, small_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        for name in ("lm_head", "model.layers.5.embed_tokens", "model.layers.5.shared_head.head"):
            tensors[f"{name}.weight"] = embedding.clone()

    rewrite(folder, add)
    assert torch.equal(logits(load(folder)), logits(load(small_path)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / SHARD).write_bytes(b""), "header would have 0 bytes"),
        (lambda f: (f / SHARD).write_bytes(b"\xff" * 64), "header would have"),
        (lambda f: (f / SHARD).write_bytes((8).to_bytes(8, "little") + b"notjson!"), "not a readable"),
        (lambda f: (f / SHARD).unlink(), "No such file"),
        (lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-1000]), "cannot open the weights"),
        (lambda f: (f / INDEX_FILE).write_text("{}"), "not a safetensors index"),
        (lambda f: (f / INDEX_FILE).write_text('{"weight_map": {"a": "../../etc/x"}}'), "outside the folder"),
        (lambda f: (f / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": SHARD}})), "does not hold"),
    ],
    ids=["empty", "junk", "bad-json", "absent", "cut", "bad-index", "escape", "wrong-place"],
)
def test_damaged_files_are_named(spoil: Callable[[Path], object], message: str, folder: Path) -> None:
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_pickle_is_never_read(folder: Path) -> None:
    (folder / SHARD).rename(folder / "pytorch_model.bin")
    (folder / INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"0 \*\.safetensors files"):
        load(folder)


def test_two_files_without_an_index_are_refused(folder: Path) -> None:
    (folder / INDEX_FILE).unlink()
    shutil.copy(folder / SHARD, folder / "other.safetensors")
    with pytest.raises(CheckpointError, match="has 2"):
        load(folder)


def test_progress_rises_to_the_total(small_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(
        small_path, dtype=torch.float32, device=CPU, progress=lambda done, total: seen.append((done, total))
    )
    total = sum(info.num_bytes for info in index_tensors(small_path).values())
    assert {all_bytes for _, all_bytes in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


def test_loaded_model_does_not_need_its_files(folder: Path, small_path: Path) -> None:
    """Weights are copied out of the maps: replacing a checkpoint cannot change a running server."""
    model = load(folder)
    with (folder / SHARD).open("r+b") as file:
        file.seek(-200_000, 2)
        file.write(b"\0" * 200_000)
    assert torch.equal(logits(model), logits(load(small_path)))


def test_fingerprint_tells_models_apart(folder: Path, small_path: Path) -> None:
    def of(path: Path, dtype: torch.dtype = torch.float32) -> str:
        return fingerprint(path, dtype=dtype, load_format="safetensors")

    same = of(small_path)
    assert of(folder) == same
    assert of(folder, torch.bfloat16) != same
    dummies = [fingerprint(folder, dtype=torch.float32, load_format="dummy", seed=seed) for seed in (0, 1)]
    assert len({same, *dummies}) == 3
    size = (folder / SHARD).stat().st_size
    with (folder / SHARD).open("r+b") as file:
        file.seek(size * 7 // 16 + 10)
        file.write(b"\x01\x02\x03")
    assert of(folder) != same
    set_config(folder, rms_norm_eps=1e-5)
    assert of(folder) != same


def test_builder_needs_exactly_what_the_checkpoint_has(embedded_path: Path) -> None:
    needed = needed_shapes(read_spec(embedded_path))
    found = {
        name: info.shape
        for name, info in index_tensors(embedded_path).items()
        if not name.endswith("_scale_inv")
    }
    assert needed == found


def test_reading_maps_the_file(small_path: Path) -> None:
    with open_checkpoint(small_path) as checkpoint:
        first, second = (checkpoint.read("model.norm.weight") for _ in range(2))
        assert first.data_ptr() == second.data_ptr()


def test_dummy_weights_are_the_same_on_every_machine() -> None:
    """Exact integer arithmetic and one table: these numbers must never change."""
    weight = take(DummySource(0, torch.float32, CPU), "model.layers.0.mlp.gate_proj.weight", 64, 64)
    found = weight.flatten()[:4].tolist()
    assert found == pytest.approx(GOLDEN, abs=1e-9)


def test_dummy_weights_follow_seed_and_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(seed: int, name: str) -> Tensor:
        return take(DummySource(seed, torch.float32, CPU), name, 100, 30)

    base = make(0, "a.weight")
    assert torch.equal(make(0, "a.weight"), base)
    for other in (make(1, "a.weight"), make(0, "b.weight")):
        assert torch.corrcoef(torch.stack((other.flatten(), base.flatten())))[0, 1].abs() < 0.1
    monkeypatch.setattr(dummy, "CHUNK", 7)
    assert torch.equal(make(0, "a.weight"), base)


def test_dummy_weights_are_normal_and_norms_are_one() -> None:
    source = DummySource(3, torch.float32, CPU)
    weight = take(source, "x.weight", 500, 400)
    assert weight.mean().abs() < 2e-4
    assert weight.std() == pytest.approx(0.02, rel=0.01)
    share = (weight.abs() < 0.02).float().mean()
    assert share == pytest.approx(0.6827, abs=0.005)
    assert torch.equal(take(source, "model.layers.0.input_layernorm.weight", 9), torch.ones(9))
    assert torch.equal(take(source, "model.layers.1.mlp.gate.e_score_correction_bias", 9), torch.zeros(9))


def test_dummy_model_runs_without_weights(folder: Path) -> None:
    (folder / SHARD).unlink()
    first, second = (load(folder, load_format="dummy", seed=seed) for seed in (5, 5))
    assert torch.equal(logits(first), logits(second))
    assert not torch.equal(logits(first), logits(load(folder, load_format="dummy", seed=6)))
    assert first.mtp is not None


def test_needed_shapes_of_a_large_config_cost_no_memory(embedded_path: Path) -> None:
    spec = replace(read_spec(embedded_path), vocab_size=10_000_000, hidden_size=100_000)
    assert needed_shapes(spec)["model.embed_tokens.weight"] == (10_000_000, 100_000)
