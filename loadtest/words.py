"""Text of a wanted length in tokens, for servers whose tokenizer is not known: common words, and a measured rate.

The same seed makes the same text. Knows no server; calibrate.py measures the rate.
"""

from dataclasses import dataclass
from random import Random

_COMMON = (
    "the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word "
    "but not what all were we when your can said there use an each which she do how their if will up other about out "
    "many then them these so some her would make like him into time has look two more write go see number no way "
    "could people my than first water been call who oil its now find long down day did get come made may part over "
    "new sound take only little work know place year live me back give most very after thing our just name good"
)
WORDS = tuple(_COMMON.split())


@dataclass(frozen=True, slots=True)
class TokenRate:
    """How the server counts: tokens = fixed + per_word x words."""

    per_word: float = 1.0
    fixed: float = 0.0  # of a request: what the chat template adds

    def words(self, tokens: int) -> int:
        """Words that make a request of so many tokens; at least 1."""
        return max(1, round((tokens - self.fixed) / self.per_word))


def text(rng: Random, num_words: int) -> str:
    """Words in random order."""
    return " ".join(rng.choices(WORDS, k=num_words))


def block(seed: str, num_words: int) -> str:
    """The same words for the same seed: what requests share."""
    return text(Random(seed), num_words)  # noqa: S311 - not for secrets
