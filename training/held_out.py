"""Chats that no training saw, as token ids: for `headrace bench accuracy --tokens`.

`PYTHONPATH=. python -P -m training.held_out COUNT > held_out.json`.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer

from training.generator.chat import render
from training.generator.chats import HELD_OUT_SEED, make_chat
from training.generator.tables import load_tables
from training.prepare import EMBEDDED

LONGEST = 1024
"""Tokens of a text; the rest is cut."""


def held_out_texts(tokenizer: Path, count: int) -> list[list[int]]:
    """Token ids of the first `count` chats of the seeds that are kept from training."""
    tables, encoder = load_tables(), Tokenizer.from_file(str(tokenizer))
    chats = (render(make_chat(HELD_OUT_SEED + i, tables)) for i in range(count))
    return [encoder.encode(chat, add_special_tokens=False).ids[:LONGEST] for chat in chats]


if __name__ == "__main__":
    json.dump(held_out_texts(EMBEDDED / "tokenizer.json", int(sys.argv[1])), sys.stdout)
