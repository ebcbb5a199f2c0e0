"""What is generated: prompts and lengths, drawn once and the same every time."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.texts import reference_words

#: Shortest and longest prompt, in words; median and deviation of their logarithm.
PROMPT_WORDS = (4, 256)
PROMPT_MEDIAN, PROMPT_SIGMA = 3.4, 0.9

#: The same of new tokens.
NEW_TOKENS = (16, 512)
NEW_MEDIAN, NEW_SIGMA = 4.4, 0.9


@dataclass(frozen=True, slots=True)
class Text:
    """One text to be generated: its length is given, and no end of the model's own cuts it."""

    prompt: str
    max_new_tokens: int

    @property
    def keywords(self) -> Mapping[str, Any]:
        """Of its job."""
        return {"max_new_tokens": self.max_new_tokens, "ignore_eos": True}


def draw_texts(
    count: int, longest: int = NEW_TOKENS[1], seed: str = "log-normal"
) -> Sequence[Text]:
    """Draws texts of log-normal length.

    Args:
        count: How many.
        longest: Maximum new tokens of one.
        seed: Another one draws other texts.
    """
    draw = random.Random(seed)
    words = reference_words()
    made = []
    for _ in range(count):
        length = _between(draw.lognormvariate(PROMPT_MEDIAN, PROMPT_SIGMA), *PROMPT_WORDS)
        begin = draw.randrange(len(words) - length)
        tokens = _between(draw.lognormvariate(NEW_MEDIAN, NEW_SIGMA), NEW_TOKENS[0], longest)
        made.append(Text(" ".join(words[begin : begin + length]), tokens))
    return made


def _between(value: float, least: int, most: int) -> int:
    return max(min(least, most), min(most, round(value)))
