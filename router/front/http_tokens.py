"""POST /tokenize and /detokenize, as vLLM spells them: what a prompt costs, and what ids stand for. No worker is asked.

`/tokenize` takes `prompt` (with what the tokenizer adds, unless `add_special_tokens` is false) or `messages` (through
the chat template); `/detokenize` takes `tokens`. Special tokens are written by name there.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Self

import orjson
from pydantic import BeforeValidator, FailFast, Field, ValidationError
from starlette.types import Receive, Scope, Send

from cluster.core.errors import InvalidRequest, Unavailable
from router.front import bounds
from router.front.ask import TextPrompt
from router.front.bodies import named, null_is_empty
from router.front.chat_bodies import MAX_TOOLS, Body, ChatMessage, ToolBody, chat_prompt
from router.front.door import FrontDoor, beside
from router.front.http_body import WhileConnected, read_json
from router.front.http_inference import Reply, public_id_of, telling
from router.front.json_body import json_object
from router.front.messages import ChatPrompt
from router.front.openai_shapes import Json

MOST_IDS = 1 << 18
_NO_LIMIT = 1 << 40  # of tokens: the size of bodies is limited


class _TokensBody(Body):
    model: str | None = None

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Raises InvalidRequest naming the field."""
        try:
            return cls.model_validate(json_object(raw, cls.model_fields.keys()))
        except ValidationError as error:
            raise named(error) from None


class TokenizeBody(_TokensBody):
    """Exactly one of `prompt` and `messages`; the rest is as in inference."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], BeforeValidator(null_is_empty)] = Field(default_factory=list)
    tools: Annotated[list[ToolBody] | None, Field(max_length=MAX_TOOLS)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_TokensBody):
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], FailFast(), Field(max_length=MOST_IDS)]


class TokensEndpoint:
    """The ASGI app of one of the two routes."""

    def __init__(self, front: FrontDoor, answer: Callable[[FrontDoor, bytes], Awaitable[Json]]) -> None:
        self._front = front
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, public_id_of(scope))
        await telling(reply, self._serve(scope, receive, reply))

    async def _serve(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        raw = await read_json(scope, receive, self._front.settings)
        async with WhileConnected(receive):
            await reply.whole(200, orjson.dumps(await self._answer(self._front, raw)), {})


async def tokenize(front: FrontDoor, raw: bytes) -> Json:
    """The ids of a prompt. Raises InvalidRequest, ModelNotFound."""
    body = TokenizeBody.parse(raw)
    bounds.check_model(front.model_name if body.model is None else body.model, front.model_name)
    prompt, param = _prompt(body), "messages" if body.prompt is None else "prompt"
    bounds.check_prompt_text(prompt, param)
    ids = await front.tokenise(prompt, _NO_LIMIT, param)
    try:
        longest: int | None = front.dispatcher.limits().max_context
    except Unavailable:  # ids can be had before any worker is known
        longest = None
    answer: Json = {"count": len(ids), "max_model_len": longest, "tokens": ids}
    if body.return_token_strs:
        label = front.text.tokenizer.label
        answer["token_strs"] = await beside(len(ids), lambda: [label(token) for token in ids])
    return answer


async def detokenize(front: FrontDoor, raw: bytes) -> Json:
    """The text of ids. Raises InvalidRequest, ModelNotFound."""
    body = DetokenizeBody.parse(raw)
    bounds.check_model(front.model_name if body.model is None else body.model, front.model_name)
    return {"prompt": await beside(len(body.tokens), partial(front.text.text_of, body.tokens, special=True))}


def _prompt(body: TokenizeBody) -> TextPrompt | ChatPrompt:
    if body.prompt is not None and not body.messages:
        return TextPrompt(body.prompt, add_special=body.add_special_tokens is not False)
    if body.messages and body.prompt is None:
        return chat_prompt(body, tuple(tool.tool() for tool in body.tools or ()))
    raise InvalidRequest("exactly one of prompt and messages is needed", param="prompt")


def token_routes(front: FrontDoor) -> dict[str, TokensEndpoint]:
    """Path -> endpoint."""
    return {"/tokenize": TokensEndpoint(front, tokenize), "/detokenize": TokensEndpoint(front, detokenize)}
