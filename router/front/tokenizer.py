"""Text to token ids, and a token id to the exact bytes it stands for.

Ids come from the model folder's own tokenizer.json. For the way back we keep bytes, not strings: a character may span
several tokens, so only the bytes of one token are well defined (utf8.py joins them again). What a decoder of
tokenizer.json does is turned into a table once, which makes decoding linear and independent of how tokens are grouped;
a decoder that cannot be expressed this way is refused at load.
"""

import re
from pathlib import Path
from typing import Protocol

import orjson
from tokenizers import Tokenizer as RustTokenizer

from cluster.core.errors import InvalidRequest, ModelError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KNOWN_DECODERS = {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}


class Tokenizer(Protocol):
    """What the front door needs of a model's tokenizer. Thread-safe."""

    leading_spaces: int
    """Spaces that the tokenizer puts before a text and that are no part of it (SentencePiece models: 1)."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of `text`. `add_special`: with what the tokenizer itself puts around a text (BOS).

        Raises InvalidRequest when `text` holds a lone surrogate, which is no Unicode text.
        """

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes this token adds to a text; None for special tokens and ids without a token."""

    def label(self, token_id: int) -> str:
        """The token as people read it in log-probabilities, special tokens by name."""


def check_unicode(text: str) -> None:
    """Raises InvalidRequest for lone surrogates: they cannot be encoded, so no tokenizer has ids for them."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"not valid Unicode text: lone surrogate at character {error.start}") from None


def label_of(token: bytes) -> str:
    """Bytes as text; bytes that are no complete UTF-8 as OpenAI writes them, `bytes:\\xe4\\xbd`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class TracerTokenizer:
    """The weightless tracer model's: ids 0..255 are bytes, every other id is written `<id>`."""

    leading_spaces = 0

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        check_unicode(text)
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes | None:
        return bytes((token_id,)) if token_id < 256 else b"<%d>" % token_id

    def label(self, token_id: int) -> str:
        return label_of(self.token_bytes(token_id) or b"")


class HuggingFaceTokenizer:
    """A tokenizer.json. Byte-level BPE and SentencePiece-like decoders. Raises ModelError for any other."""

    def __init__(self, path: Path) -> None:
        try:
            self._rust = RustTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every fault
            raise ModelError(f"cannot load tokenizer {path}: {error}") from error
        # A stored truncation or padding would cut or fill prompts silently.
        self._rust.no_truncation()
        self._rust.no_padding()
        self._added = {i: (t.content, t.special) for i, t in self._rust.get_added_tokens_decoder().items()}
        self._cache: dict[int, bytes | None] = {}
        steps = _decoder_steps(orjson.loads(path.read_bytes()).get("decoder"), path)
        kinds = {str(step["type"]) for step in steps}
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self._replace = [pair for step in steps if (pair := _replacement(step, path))]
        self.leading_spaces = sum(_stripped(step, path) for step in steps)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        check_unicode(text)
        # Measured: `encode` keeps the GIL, 0.9 s for a million characters; the batch call releases it.
        [encoding] = self._rust.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encoding.ids
        return ids

    def token_bytes(self, token_id: int) -> bytes | None:
        try:
            return self._cache[token_id]
        except KeyError:
            self._cache[token_id] = token = self._derive(token_id)
            return token

    def label(self, token_id: int) -> str:
        if token_id in self._added:
            return self._added[token_id][0]
        return label_of(self.token_bytes(token_id) or b"")

    def _derive(self, token_id: int) -> bytes | None:
        if token_id in self._added:
            content, special = self._added[token_id]
            return None if special else content.encode()
        piece = self._rust.id_to_token(token_id)
        if piece is None:  # embeddings are often padded beyond the vocabulary
            return None
        if self._alphabet is not None:
            if all(char in self._alphabet for char in piece):
                return bytes(self._alphabet[char] for char in piece)
            return piece.encode()
        if self._byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes((int(match[1], 16),))
        for old, new in self._replace:
            piece = piece.replace(old, new)
        return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (openai/gpt-2, encoder.py, `bytes_to_unicode`), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return alphabet


Step = dict[str, object]


def _decoder_steps(decoder: Step | None, path: Path) -> list[Step]:
    """The decoder's steps, sequences flattened. Raises ModelError for a kind that has no bytes per token."""
    if decoder is None:
        raise ModelError(f"{path} has no decoder, so its tokens have no text")
    inner = decoder.get("decoders")
    if decoder.get("type") == "Sequence" and isinstance(inner, list):
        return [step for part in inner for step in _decoder_steps(part, path)]
    if decoder.get("type") not in _KNOWN_DECODERS:
        raise ModelError(f"{path}: decoder {decoder.get('type')!r} is not supported")
    return [decoder]


def _replacement(step: Step, path: Path) -> tuple[str, str] | None:
    if step["type"] == "Metaspace":
        return str(step.get("replacement", "▁")), " "
    if step["type"] != "Replace":
        return None
    pattern = step.get("pattern")
    if not isinstance(pattern, dict) or "String" not in pattern:
        raise ModelError(f"{path}: decoder Replace with a regular expression is not supported")
    return str(pattern["String"]), str(step.get("content", ""))


def _stripped(step: Step, path: Path) -> int:
    """Leading spaces this step takes from the start of a text."""
    if step["type"] == "Metaspace":
        never = step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False
        return 0 if never else 1
    if step["type"] != "Strip":
        return 0
    start = step.get("start")
    if step.get("content") != " " or step.get("stop") != 0 or not isinstance(start, int):
        raise ModelError(f"{path}: decoder {step} is not supported")
    return start
