"""Bytes of tokens to characters, one token after another (FAULTS C23).

A character that spans tokens appears when its last byte does; bytes that never become a character appear as U+FFFD, in
mid-text when the next byte shows it and at the end on `finish`. The same rules as bytes.decode("utf-8", "replace") over
the whole, however the tokens were grouped.
"""

import codecs

_Decoder = codecs.getincrementaldecoder("utf-8")


class Utf8Stream:
    """`leading_spaces`: this many spaces at the very start are the tokenizer's own and dropped."""

    def __init__(self, leading_spaces: int) -> None:
        self._decoder = _Decoder("replace")
        self._strip = leading_spaces
        self.characters = 0
        """Complete characters so far."""

    def feed(self, token: bytes) -> tuple[bytes, str]:
        """The bytes this token really contributed, and the characters that are complete because of it."""
        while self._strip and token:
            if token[0] != 0x20:
                self._strip = 0
                break
            token = token[1:]
            self._strip -= 1
        text = self._decoder.decode(token)
        self.characters += len(text)
        return token, text

    def finish(self) -> str:
        """What an incomplete character at the end becomes: U+FFFD, or nothing."""
        text = self._decoder.decode(b"", final=True)
        self.characters += len(text)
        return text
