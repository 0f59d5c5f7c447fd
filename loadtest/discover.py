"""What a load test asks the server before it begins: its model, and how it counts tokens.

Two small requests; nothing is assumed of the tokenizer. Called by plan.py.
"""

import http.client
import json
from time import perf_counter
from urllib.parse import urlsplit

from headrace.config import ConfigError
from headrace.loadtest.client import Client, Target
from headrace.loadtest.conversation import Asking
from headrace.loadtest.exchange import Exchange
from headrace.loadtest.words import TokenRate, block
from headrace.loadtest.workload import Turn

SHORT, LONG = 40, 240  # words


class NoServer(ConfigError):
    """The server does not answer as an OpenAI-compatible one does."""


def served_model(target: Target) -> str:
    """The first model that the server lists.

    Raises:
        NoServer: it lists none.
    """
    host, port, context = target.address()
    if context is None:
        connection = http.client.HTTPConnection(host, port, timeout=10)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=10, context=context)
    base = urlsplit(target.url).path.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    try:
        connection.request("GET", f"{base}/v1/models", headers=headers)
        answer = connection.getresponse()
        content = answer.read(1 << 20)
        if answer.status != 200:
            raise NoServer(
                f"{target.url}/v1/models answers {answer.status}: {content[:200].decode(errors='replace')}"
            )
        return str(json.loads(content)["data"][0]["id"])
    except (OSError, http.client.HTTPException) as error:
        raise NoServer(f"no server at {target.url}: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise NoServer(f"{target.url}/v1/models lists no model; give --model") from None
    finally:
        connection.close()


async def token_rate(client: Client, asking: Asking, seed: int) -> tuple[TokenRate, bool]:
    """How the server counts words as tokens, and whether it said so.

    Raises:
        NoServer: it refuses the requests.
    """
    counts = []
    for num_words in (SHORT, LONG):
        turn = Turn(block(f"{seed} rate {num_words}", num_words), 1)
        call = asking.call([{"role": "user", "content": turn.prompt}], turn)
        exchange = Exchange(call, perf_counter())
        await client.send(exchange)
        if exchange.error:
            raise NoServer(f"the server refuses a request ({exchange.error}): {exchange.detail}")
        counts.append(exchange.prompt_tokens)
    short, long = counts
    if not short < long:
        return TokenRate(1.3), False
    per_word = (long - short) / (LONG - SHORT)
    return TokenRate(per_word, max(0.0, short - per_word * SHORT)), True
