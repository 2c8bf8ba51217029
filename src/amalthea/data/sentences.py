"""Natural sentences out of the messages of translated programs."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

_MARKUP = re.compile(r"[<&\[*_`]")
_BLOCK_TAG = re.compile(r"<(?:br|/?(?:p|div|h\d|li|ul|ol|tr|td))\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"<[^<>]*>")
_LINK = re.compile(r"!?\[([^\]\n]*)\]\([^()\n]*\)")
_EMPHASIS = re.compile(r"\*\*|__|`+")
_LIST_MARK = re.compile(r"^(?:[-*•#>]+|\d+[.)])\s+")
_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+")

# What is left of a placeholder, of markup, or of a technical string: a sentence that holds one is not whole.
_NOT_PROSE = re.compile(r"[{}<>|\\=~^_@*\[\]`]|://|%[\w(%]|\$\w|&\w+;|(?:^|\s)/\w|\w/\w+/|\w\(\)|\.\w+\.\w")

_MIN_WORDS = 3
_MIN_LETTERS = 12
_MIN_LETTER_SHARE = 0.6


def sentences(message: str) -> Iterator[str]:
    """The lines of `message` that read as prose, cleaned of markup.

    A line in which a placeholder or markup remains is cut into sentences, and only the whole ones are kept.
    """
    if message.count(" ") < _MIN_WORDS - 1:
        return
    if _MARKUP.search(message):
        message = _without_markup(message)
    for line in message.splitlines():
        line = _LIST_MARK.sub("", line.strip())
        if not _NOT_PROSE.search(line):
            candidates = [line]
        else:
            candidates = [part for part in _SENTENCE_END.split(line) if not _NOT_PROSE.search(part)]
        for candidate in candidates:
            if _is_long_enough(candidate):
                yield " ".join(candidate.split())


def _without_markup(message: str) -> str:
    message = _TAG.sub("", _BLOCK_TAG.sub("\n", message))
    message = _LINK.sub(r"\1", html.unescape(message))
    return _EMPHASIS.sub("", message)


def _is_long_enough(text: str) -> bool:
    if text.count(" ") + 1 < _MIN_WORDS:
        return False
    letters = sum(map(str.isalpha, text))
    return letters >= _MIN_LETTERS and letters >= _MIN_LETTER_SHARE * len(text)
