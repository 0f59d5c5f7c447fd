"""The only reader of environment variables: once, at start, into a frozen record. docs/operations.md lists them.

No HEADRACE_HOST or HEADRACE_PORT on purpose: Kubernetes sets variables of such names for a service "headrace".
The CLI calls; flags win over the environment.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.config import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says; empty = nothing."""

    api_keys: tuple[str, ...] = ()  # HEADRACE_API_KEYS: what the server accepts, separated by commas
    api_key: str = ""  # HEADRACE_API_KEY: what `chat` and `models` send
    url: str = ""  # HEADRACE_URL: the server that `chat` and `models` talk to
    model: str = ""  # HEADRACE_MODEL: folder that `serve` and `engine` load
    log_level: str = ""  # HEADRACE_LOG_LEVEL


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read and check.

    Args:
        variables: the process's own when None.

    Raises:
        ConfigError: a variable has a value that cannot be meant.
    """
    variables = os.environ if variables is None else variables
    keys = variables.get("HEADRACE_API_KEYS", "")
    api_keys = tuple(key.strip() for key in keys.split(","))
    if keys and not all(api_keys):
        raise ConfigError("HEADRACE_API_KEYS has an empty key; separate keys by single commas")
    url = variables.get("HEADRACE_URL", "")
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(f"HEADRACE_URL = {url!r} is not an http:// or https:// URL")
    level = variables.get("HEADRACE_LOG_LEVEL", "").lower()
    if level and level not in LOG_LEVELS:
        raise ConfigError(f"HEADRACE_LOG_LEVEL = {level!r} is none of {', '.join(LOG_LEVELS)}")
    return Environment(
        api_keys=api_keys if keys else (),
        api_key=variables.get("HEADRACE_API_KEY", ""),
        url=url.rstrip("/"),
        model=variables.get("HEADRACE_MODEL", ""),
        log_level=level,
    )


def keep_compiled() -> None:
    """Let engines keep what torch.compile makes in the user's cache folder, unless the user named another.

    torch reads the variable, and processes started from now on inherit it; its own choice is the temporary folder,
    which a restart of the machine empties.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "headrace" / "inductor"))
