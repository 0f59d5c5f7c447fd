"""Results as typed records, appended to a JSONL file; each says on what it was measured.

Knows no engine. Called by the benchmarks of this folder.
"""

import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from headrace.core.bench.step_profile import StepProfile

PACKAGES = ("torch", "triton", "transformers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """One measured point of an engine."""

    bench: str  # decode | prefill | mixed
    model: str  # name of the model's folder
    dtype: str  # of the weights: bfloat16, fp8 (blocks of 128x128), ...
    batch: int  # requests at once
    prompt_tokens: float  # of a request, mean
    output_tokens: float  # the same; of a decode, in the longer one of its two runs
    speculate: str  # how tokens are drafted
    step_ms: float  # median: of a decode step, or of the whole run of a prefill or a trace
    step_ms_spread: tuple[float, float]  # smallest and largest of the repeats
    tokens_per_s: float  # outputs of a decode, inputs of a prefill, both of a trace
    output_tokens_per_s: float | None  # of a trace
    ceiling_ms: float | None  # what bandwidth and product rate of the same run allow
    of_ceiling: float | None  # ceiling_ms / step_ms
    peer: str  # whose figure `peer_tokens_per_s` is, "" = none
    peer_tokens_per_s: float | None
    ratio: float | None  # tokens_per_s / peer_tokens_per_s
    profile: StepProfile | None  # where it was asked for
    card: str
    threads: int  # of the host that the model ran on; 0 on a card
    versions: Mapping[str, str]
    commit: str


def append(path: Path, record: EngineRecord) -> None:
    """Add one line to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def card(device: torch.device) -> str:
    """Name of the device that was measured."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor()


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide about speed, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return found


def commit() -> str:
    """The checked-out commit, with a + where files differ from it; "" outside a checkout or without git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=10"],  # noqa: S607 - the user's own git
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return ""
    return described.stdout.strip()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
