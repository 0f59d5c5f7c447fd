"""One message of each kind, and the settings the tests connect with."""

from headrace.config import WireConfig
from headrace.ipc.messages import (
    PROTOCOL_VERSION,
    Finished,
    Hello,
    Load,
    Logprobs,
    Sampling,
    Submit,
    Tokens,
    Usage,
    Welcome,
)
from headrace.ipc.packed import pack_float32, pack_int32, pack_uint32

WIRE = WireConfig(heartbeat_s=0.05, dead_after_s=30.0)
HELLO = Hello(PROTOCOL_VERSION, "gateway-0", "")
WELCOME = Welcome(PROTOCOL_VERSION, "engine-0", "print", "model", 1000, 2048, 8, 128, 16)
SAMPLING = Sampling(
    max_tokens=5, temperature=0.5, logit_bias=((3, -1.5),), seed=7, stop_token_ids=(2, 9), logprobs=2
)
SUBMIT = Submit(1, "request", "tenant", "salt", -3, pack_int32([1, 2, 3]), pack_int32([4]), SAMPLING, 256)
USAGE = Usage(3, 0, 2, 0.25, 0.5, 1.0, 0, 12.5, 4, 3)
FINISHED = Finished(1, "stop", USAGE, "")
TOKENS = Tokens(
    step=9,
    streams=pack_uint32([1, 8]),
    starts=pack_uint32([0, 40]),
    counts=bytes([1, 2]),
    token_ids=pack_int32([10, 20, 30]),
    logprobs=(Logprobs(1, pack_float32([-0.5, -1]), 1, pack_int32([20, 30]), pack_float32([-0.5, -1])),),
    finished=(FINISHED,),
)
LOAD = Load(
    "engine-0", "ready", 0.0, 1, 2, 3, 4, 128, 9, 1.5, 3, 0, 2, 3, 0, 0, 0, 4.5, 0.25, 2, 3, 4, (2, 1)
)
