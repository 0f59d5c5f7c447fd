"""Chats that no training saw, as token ids, for `--tokens` of `headrace bench accuracy` and `bench engine`.

`PYTHONPATH=. python -P -m training.held_out COUNT > held_out.json`; with `--prompts`, up to the last answer alone.
"""

import argparse
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer

from training.evaluate import held_out_prompts
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


def main() -> None:
    """Print them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m training.held_out", description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--prompts", action="store_true", help="end where the last answer begins")
    found = parser.parse_args()
    path = EMBEDDED / "tokenizer.json"
    if found.prompts:
        texts = held_out_prompts(Tokenizer.from_file(str(path)), found.count, LONGEST)
    else:
        texts = held_out_texts(path, found.count)
    json.dump(texts, sys.stdout)


if __name__ == "__main__":
    main()
