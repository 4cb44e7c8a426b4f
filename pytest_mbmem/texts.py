"""Text from tests, recipes and other processes, made fit to be shown or written."""

from __future__ import annotations


def printable(line: str) -> str:
    """Without what would break a line or steer the terminal."""
    return "".join(character if character.isprintable() else "?" for character in line)


def encodable(text: str) -> str:
    """As UTF-8 can hold it: lone surrogates, which Python makes of undecodable bytes, are written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
