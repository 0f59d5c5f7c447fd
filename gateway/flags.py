"""The flags that several commands share, as annotated types, and the one reader of sizes.

Help texts only; what a value may be is checked by Config. Used by cli.py.
"""

import re
from typing import Annotated, Literal

from typer import Option

from headrace.config import ConfigError

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
FormatName = Literal["safetensors", "dummy"]
QuantizationName = Literal["", "fp8"]
DraftersName = Literal["default", "auto", "mtp", "ngram", "off"]
LevelName = Literal["debug", "info", "warning", "error"]

EngineName = Literal["core", "synthetic"]

MODEL, CACHE, BATCH, HTTP, PROCESSES = "Model", "KV cache", "Batching", "HTTP", "Processes"

Model = Annotated[
    str,
    Option(metavar="DIR", help="Hugging Face folder; without it, the embedded model.", rich_help_panel=MODEL),
]
ServedName = Annotated[
    str, Option(metavar="NAME", help="Name in the API; without it, the folder's.", rich_help_panel=MODEL)
]
DType = Annotated[
    DTypeName, Option(metavar="DTYPE", help="auto, float32, bfloat16 or float16.", rich_help_panel=MODEL)
]
Device = Annotated[DeviceName, Option(help="Where the engines compute.", rich_help_panel=MODEL)]
MaxModelLen = Annotated[
    int,
    Option(
        metavar="N",
        min=0,
        help="Tokens of prompt and output; 0 = what the model allows.",
        rich_help_panel=MODEL,
    ),
]
Quantization = Annotated[
    QuantizationName,
    Option(
        metavar="FORMAT",
        help="fp8 = round wide weights to 128x128 blocks while loading.",
        rich_help_panel=MODEL,
    ),
]
LoadFormat = Annotated[FormatName, Option(help="dummy = random weights, for tests.", rich_help_panel=MODEL)]

KvMemory = Annotated[
    str,
    Option(
        metavar="SIZE",
        help="Per engine, such as 512M or 8G; without it, what a card has left.",
        rich_help_panel=CACHE,
    ),
]
GpuMemoryUtilization = Annotated[
    float,
    Option(metavar="SHARE", help="Of a card's memory, KV cache included.", rich_help_panel=CACHE),
]
KvBlocks = Annotated[
    int, Option(metavar="N", min=0, help="Blocks, instead of --kv-memory.", rich_help_panel=CACHE)
]
BlockSize = Annotated[int, Option(metavar="N", help="Tokens in a block.", rich_help_panel=CACHE)]
PrefixCache = Annotated[
    bool, Option("--prefix-cache/--no-prefix-cache", help="Reuse equal beginnings.", rich_help_panel=CACHE)
]

MaxNumSeqs = Annotated[
    int, Option(metavar="N", min=0, help="Requests in a batch; 0 = by device.", rich_help_panel=BATCH)
]
MaxBatchedTokens = Annotated[
    int, Option(metavar="N", min=0, help="Tokens in one step; 0 = by device.", rich_help_panel=BATCH)
]
Compile = Annotated[
    bool,
    Option("--compile/--no-compile", help="torch.compile of the layers, on a card.", rich_help_panel=BATCH),
]
Deterministic = Annotated[
    bool,
    Option("--deterministic", help="Answers do not depend on batch-mates; slower.", rich_help_panel=BATCH),
]
MaxWaiting = Annotated[
    int, Option(metavar="N", help="Queued requests of an engine; one more gets 429.", rich_help_panel=BATCH)
]

Speculate = Annotated[
    DraftersName,
    Option(
        metavar="DRAFTER",
        help="mtp = the checkpoint's own, ngram = look-up in the text, auto = both, off; "
        "default = auto on a CPU, off on a card.",
        rich_help_panel=BATCH,
    ),
]
DraftTokens = Annotated[
    int, Option(metavar="K", help="Tokens that mtp looks ahead, 1 to 8.", rich_help_panel=BATCH)
]
DraftModel = Annotated[
    str,
    Option(
        metavar="DIR", help="An EAGLE head in place of the checkpoint's own drafter.", rich_help_panel=BATCH
    ),
]

Host = Annotated[str, Option(metavar="HOST", help="Address to listen on.", rich_help_panel=HTTP)]
Port = Annotated[int, Option(metavar="PORT", help="0 = any free one.", rich_help_panel=HTTP)]
ApiKeys = Annotated[
    list[str] | None,
    Option(metavar="KEY", help="Accept this key; repeatable. Also HEADRACE_API_KEYS.", rich_help_panel=HTTP),
]
CorsOrigins = Annotated[
    list[str] | None,
    Option(
        metavar="ORIGIN",
        help="Origin that browsers may call from; repeatable, * = any.",
        rich_help_panel=HTTP,
    ),
]
MaxStreams = Annotated[
    int, Option(metavar="N", min=1, help="Open generations of a worker.", rich_help_panel=HTTP)
]
RequestTimeout = Annotated[
    float, Option(metavar="S", min=0.001, help="Seconds a generation may take.", rich_help_panel=HTTP)
]
PricePerGpuHour = Annotated[
    float,
    Option(
        metavar="USD",
        min=0,
        help="What an engine costs; answers then say theirs. 0 = unknown.",
        rich_help_panel=HTTP,
    ),
]
Drain = Annotated[
    float,
    Option(
        metavar="S", min=0, help="Seconds that streams may still run after SIGTERM.", rich_help_panel=HTTP
    ),
]

Workers = Annotated[
    int, Option(metavar="N", help="Gateway processes on the port.", rich_help_panel=PROCESSES)
]
Engines = Annotated[int, Option(metavar="N", help="Engine processes.", rich_help_panel=PROCESSES)]
Threads = Annotated[
    int,
    Option(
        metavar="N", min=0, help="CPU threads of an engine; 0 = cores / engines.", rich_help_panel=PROCESSES
    ),
]
EngineAddresses = Annotated[
    list[str] | None,
    Option(
        metavar="URL",
        help="Use the engine at tcp://HOST:PORT, start none; repeatable.",
        rich_help_panel=PROCESSES,
    ),
]
CurveDir = Annotated[
    str, Option(metavar="DIR", help="Keys for tcp://, see `headrace keys`.", rich_help_panel=PROCESSES)
]
RunDir = Annotated[
    str, Option(metavar="DIR", help="For sockets; without it, a fresh one.", rich_help_panel=PROCESSES)
]
EngineKind = Annotated[
    EngineName, Option(help="synthetic = no model, tokens on a timer.", rich_help_panel=PROCESSES)
]
StepMs = Annotated[
    float | None, Option(metavar="MS", min=0, help="Step of --engine synthetic.", rich_help_panel=PROCESSES)
]
LogLevel = Annotated[
    LevelName | None,
    Option(
        metavar="LEVEL",
        help="debug, info, warning or error; also HEADRACE_LOG_LEVEL.",
        rich_help_panel=PROCESSES,
    ),
]

Url = Annotated[
    str, Option(metavar="URL", help="The server; also HEADRACE_URL. Without it, http://127.0.0.1:8000.")
]
ClientKey = Annotated[str, Option("--api-key", metavar="KEY", help="Also HEADRACE_API_KEY.")]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def parse_size(flag: str, text: str) -> int:
    """Bytes of "512M", "8G", "1.5 GiB", "1048576"; units are powers of 1024.

    Raises:
        ConfigError: the text is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{flag} = {text!r} is no size; write it like 512M or 8G")
    return int(float(match[1]) * (1 << _UNITS[match[2].upper()]))
