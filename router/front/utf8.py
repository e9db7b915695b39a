"""Bytes of tokens to characters, one token after another (FAULTS C23).

A character that spans tokens appears when its last byte does; bytes that never become a character appear as U+FFFD, in
mid-text when the next byte shows it and at the end on `finish`. The same rules as bytes.decode("utf-8", "replace") over
the whole, however the tokens were grouped.
"""

from codecs import utf_8_decode


class Utf8Stream:
    """`leading_spaces`: this many spaces at the very start are the tokenizer's own and dropped."""

    def __init__(self, leading_spaces: int) -> None:
        self._begun = b""  # of a character whose other bytes have not come
        self._strip = leading_spaces
        self.characters = 0
        """Complete characters so far."""

    def feed(self, token: bytes) -> tuple[bytes, str]:
        """The bytes this token really contributed, and the characters that are complete because of it."""
        if self._strip:
            token = self._stripped(token)
        data = self._begun + token
        text, used = utf_8_decode(data, "replace", False)
        self._begun = data[used:]
        self.characters += len(text)
        return token, text

    def finish(self) -> str:
        """What an incomplete character at the end becomes: U+FFFD, or nothing."""
        text, _ = utf_8_decode(self._begun, "replace", True)
        self._begun = b""
        self.characters += len(text)
        return text

    def _stripped(self, token: bytes) -> bytes:
        """Without the spaces that are the tokenizer's own."""
        while self._strip and token:
            if token[0] != 0x20:
                self._strip = 0
                break
            token = token[1:]
            self._strip -= 1
        return token
