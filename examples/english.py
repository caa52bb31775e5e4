"""Real English sentences that are on every machine: the prose of Python's language reference (`pydoc_data.topics`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pydoc_data.topics import topics

_SENTENCE_END = re.compile(r"(?<=[a-z][.!?]) +(?=[A-Z])")
_WORD = re.compile(r"[A-Za-z][a-z'-]*[,;:.]?")
_WORDS = range(8, 29)
_PLAIN = 0.9


def _paragraphs() -> Iterator[str]:
    """Unindented paragraphs in the order of topics: code and grammar are indented, lists and titles are marked."""
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            lines = paragraph.strip("\n").split("\n")
            if not any(line.startswith((" ", "*", "=", "-", "^", "[")) for line in lines):
                yield " ".join(lines)


def sentences(count: int) -> list[str]:
    """English sentences of 8 to 28 words, spread evenly over the reference, always the same for one Python version.

    Args:
      count: How many.

    Returns:
      Distinct sentences in which nine of ten words are plain words.

    Raises:
      ValueError: Where there are fewer.

    Example:
      >>> sentences(200)[0].endswith(".")
      True
    """
    found = dict.fromkeys(
        re.sub(r" +", " ", sentence).strip()
        for paragraph in _paragraphs()
        for sentence in _SENTENCE_END.split(paragraph)
        if _is_plain(sentence)
    )
    if not 2 <= count <= len(found):
        raise ValueError(f"sentences is {count}, expected 2 to {len(found)} (= sentences found in pydoc_data.topics)")
    chosen = list(found)
    return [chosen[i * len(chosen) // count] for i in range(count)]


def _is_plain(sentence: str) -> bool:
    words = sentence.split()
    if len(words) not in _WORDS or not sentence[0].isupper() or not sentence.endswith("."):
        return False
    return sum(bool(_WORD.fullmatch(word)) for word in words) >= _PLAIN * len(words)
