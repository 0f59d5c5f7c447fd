"""What a record says about where it was measured: versions, processor, commit. Knows nothing of load."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("headrace", "uvloop", "orjson", "numpy")


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide about the client's speed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def commit() -> str:
    """The checked-out commit, with a + where files differ from it; "" outside a checkout."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=10"],  # noqa: S607 - the user's own git
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return described.stdout.strip()
