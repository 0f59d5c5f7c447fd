"""The rules of the repository's shape: who imports whom, what the documents name, how large a module is."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("gateway", "ipc", "core", "kernels", "loadtest")
MAY_IMPORT = {
    "gateway": {"gateway", "ipc", "config", "environ"},
    "ipc": {"ipc", "config"},
    "core": {"core", "ipc", "kernels", "config"},
    "kernels": {"kernels"},
    "loadtest": {"loadtest", "ipc", "config", "environ"},
}
NO_TORCH = ("gateway", "ipc", "loadtest")
MAX_LINES = 500


def modules(*rooms: str) -> Iterator[Path]:
    for room in rooms:
        yield from sorted((ROOT / room).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Dotted names of everything a module imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(room)
        for name in imported(path)
        if name.startswith("headrace.") and name.split(".")[1] not in {*MAY_IMPORT[room], "__version__"}
    ]
    assert not wrong


@pytest.mark.parametrize("room", NO_TORCH)
def test_the_gateway_side_never_loads_torch(room: str) -> None:
    wrong = [str(path) for path in modules(room) for name in imported(path) if name.split(".")[0] == "torch"]
    assert not wrong


def test_nothing_is_unpickled_or_evaluated() -> None:
    """No pickle, marshal, eval or exec anywhere in the product."""
    banned = {"pickle", "marshal", "shelve", "dill"}
    for path in modules(*ROOMS):
        assert not banned & {name.split(".")[0] for name in imported(path)}, path
        calls = {
            node.func.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not calls & {"eval", "exec"}, path


def test_the_environment_is_read_in_one_file() -> None:
    for path in [*modules(*ROOMS), *(ROOT / "src/headrace").glob("*.py")]:
        if path.name != "environ.py":
            assert not re.search(r"os\.environ\b(?!\s*\|)|getenv\(", path.read_text()), path


def test_modules_open_with_a_short_docstring_and_stay_small() -> None:
    for path in modules(*ROOMS):
        text = path.read_text()
        docstring = ast.get_docstring(ast.parse(text))
        assert docstring, f"{path} has no docstring"
        assert len(docstring.splitlines()) <= 5, f"{path}: the docstring of a module is an introduction"
        assert len(text.splitlines()) <= MAX_LINES, f"{path} passes {MAX_LINES} lines"


def test_kernels_stays_a_namespace() -> None:
    """With an `__init__.py` it would shadow Hugging Face's `kernels` for whoever runs from the root."""
    assert not (ROOT / "kernels/__init__.py").exists()


def test_the_rooms_are_links_under_src() -> None:
    for room in ROOMS:
        assert (ROOT / "src/headrace" / room).is_symlink(), room


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    folders = "gateway|ipc|core|kernels|loadtest|tests|docs|src|training"
    named = set(re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text()))
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing


def test_importing_the_gateway_loads_no_torch() -> None:
    """In a process of its own: what a worker imports must start quickly."""
    code = "import sys, headrace.gateway.worker; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
