"""POST /tokenize and /detokenize, as vLLM spells them: what a prompt costs, and what ids stand for. No worker is asked.

`/tokenize` takes `prompt` (with what the tokenizer adds, unless `add_special_tokens` is false) or `messages` (through
the chat template); `/detokenize` takes `tokens`. Special tokens are written by name there.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Self

import orjson
from pydantic import FailFast, ValidationError
from starlette.types import Receive, Scope, Send

from cluster.core.errors import InvalidRequest, Unavailable
from router.front import bounds
from router.front.bodies import Body, ChatMessage, json_object, named
from router.front.chat import ChatTurn
from router.front.door import INLINE_CHARACTERS, FrontDoor
from router.front.http_body import check_media_type, read_body_within, while_connected
from router.front.http_inference import BODY_S, Reply, public_id_of, telling
from router.front.openai_shapes import Json

_MOST_IDS = 1_000_000


class _TokensBody(Body):
    model: str | None = None

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Raises InvalidRequest naming the field."""
        try:
            return cls.model_validate(json_object(raw))
        except ValidationError as error:
            raise named(error) from None


class TokenizeBody(_TokensBody):
    """Exactly one of `prompt` and `messages`."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_TokensBody):
    tokens: Annotated[list[int], FailFast()]


class TokensEndpoint:
    """The ASGI app of one of the two routes."""

    def __init__(self, front: FrontDoor, answer: Callable[[FrontDoor, bytes], Awaitable[Json]]) -> None:
        self._front = front
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, public_id := public_id_of(scope))
        async with telling(reply, public_id):
            settings = self._front.settings
            patience_s = min(BODY_S, settings.deadline_s)
            raw = await read_body_within(scope, receive, settings.max_body_bytes, patience_s)
            check_media_type(scope)
            await while_connected(receive, self._serve(raw, reply))

    async def _serve(self, raw: bytes, reply: Reply) -> None:
        await reply.whole(200, orjson.dumps(await self._answer(self._front, raw)), {})


async def tokenize(front: FrontDoor, raw: bytes) -> Json:
    """The ids of a prompt. Raises InvalidRequest, ModelNotFound."""
    body = TokenizeBody.parse(raw)
    bounds.check_model(front.model_name if body.model is None else body.model, front.model_name)
    text, special = _prompt(front, body)
    encode = front.text.tokenizer.encode
    short = len(text) <= INLINE_CHARACTERS
    ids = encode(text, add_special=special) if short else await asyncio.to_thread(encode, text, add_special=special)
    try:
        longest: int | None = front.dispatcher.limits().max_context
    except Unavailable:  # ids can be had before any worker is known
        longest = None
    answer: Json = {"count": len(ids), "max_model_len": longest, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [front.text.tokenizer.label(token) for token in ids]
    return answer


async def detokenize(front: FrontDoor, raw: bytes) -> Json:
    """The text of ids. Raises InvalidRequest, ModelNotFound."""
    body = DetokenizeBody.parse(raw)
    bounds.check_model(front.model_name if body.model is None else body.model, front.model_name)
    if len(body.tokens) > _MOST_IDS:
        raise InvalidRequest(f"tokens: at most {_MOST_IDS} ids are taken at once", param="tokens")
    if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < 1 << 31):
        raise InvalidRequest("tokens: token ids must be 0 or more, and of 31 bits", param="tokens")
    return {"prompt": _text(front, body.tokens)}


def _prompt(front: FrontDoor, body: TokenizeBody) -> tuple[str, bool]:
    """The text, and whether the tokenizer adds its own tokens."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("exactly one of prompt and messages is needed", param="prompt")
    if body.messages is None:
        assert body.prompt is not None
        bounds.check_text(body.prompt, "prompt")
        return body.prompt, body.add_special_tokens is not False
    if front.text.chat is None:
        raise InvalidRequest("this model has no chat template; send a prompt", param="messages")
    turns = tuple(ChatTurn(message.role, message.content) for message in body.messages)
    for turn in turns:
        bounds.check_text(turn.content, "messages")
    return front.text.chat.render(turns), False


def _text(front: FrontDoor, ids: list[int]) -> str:
    tokenizer = front.text.tokenizer
    pieces = [
        tokenizer.label(token).encode() if (piece := tokenizer.token_bytes(token)) is None else piece for token in ids
    ]
    text = b"".join(pieces).decode("utf-8", "replace")
    spaces = len(text) - len(text.lstrip(" "))
    return text[min(spaces, tokenizer.leading_spaces) :]


def token_routes(front: FrontDoor) -> dict[str, TokensEndpoint]:
    """Path -> endpoint."""
    return {"/tokenize": TokensEndpoint(front, tokenize), "/detokenize": TokensEndpoint(front, detokenize)}
