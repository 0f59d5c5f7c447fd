"""Each operation stands beside its reference, and the two are called alike."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"


def pairs() -> list[tuple[str, str]]:
    """(module, operation) of every function `x_ref` in kernels/."""
    return [
        (file.stem, node.name.removesuffix("_ref"))
        for file in sorted(KERNELS.glob("*.py"))
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_ref")
    ]


@pytest.mark.parametrize(("module", "name"), pairs())
def test_operation_and_reference_have_one_signature(module: str, name: str) -> None:
    loaded = import_module(f"headrace.kernels.{module}")
    operation, reference = getattr(loaded, name), getattr(loaded, f"{name}_ref")
    assert inspect.signature(operation) == inspect.signature(reference)


def test_the_operations_of_a_step_are_all_there() -> None:
    names = {name for _, name in pairs()}
    assert names >= {
        "add_rms_norm",
        "experts",
        "fp8_block_dequantize",
        "fp8_block_quantize",
        "gqa_attention",
        "linear",
        "mla_attention",
        "mla_kv_write",
        "mla_query",
        "mla_value",
        "qk_norm_rope_kv_write",
        "rms_norm",
        "rope",
        "route_sigmoid",
        "route_softmax",
        "silu_mul",
    }


def test_kernels_is_no_package() -> None:
    """With an __init__.py it would shadow Hugging Face's `kernels` wherever the repository is on the path."""
    assert not (KERNELS / "__init__.py").exists()
