"""The two ends of the wire, under one name for those who use them."""

from headrace.ipc.engine_socket import EngineSocket
from headrace.ipc.gateway_socket import GatewaySocket

__all__ = ["EngineSocket", "GatewaySocket"]
