"""Answers libzmq's question whether a client's public key may connect (ZAP, https://rfc.zeromq.org/spec/27).

Owns the allow-list. Runs no thread: the engine's socket calls `serve` whenever it looks at its own frames.
"""

import zmq

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = "headrace"
MAX_PER_CALL = 64  # handshakes answered in one call; the others wait for the next


class Gatekeeper:
    """The ZAP handler of one context.

    Args:
        context: of the guarded socket; it has one handler only.
        allowed: raw public keys, 32 bytes each.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: frozenset[bytes]) -> None:
        self._allowed = allowed
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)
        self.refused = 0

    def serve(self) -> None:
        """Answer the handshakes that wait."""
        for _ in range(MAX_PER_CALL):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, sequence = request[:2]
            mechanism, credentials = request[5], request[6:]
            admitted = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self._allowed
            self.refused += not admitted
            status = [b"200", b"OK"] if admitted else [b"400", b"this key may not connect"]
            self.socket.send_multipart([version, sequence, *status, b"", b""], zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close()
