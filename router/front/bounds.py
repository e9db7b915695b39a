"""What is possible: every bound a request must keep before any worker hears of it (DESIGN §4.1; FAULTS C29, C30, S07).

`check_parameters` needs no worker; `fit` needs the cluster's limits and the prompt's ids. Both raise InvalidRequest
naming the parameter as the client spelt it.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.core.config import RouterSettings
from cluster.core.errors import InvalidRequest, ModelNotFound
from router.front.ask import Ask, Prompt, TextPrompt, TokenPrompt
from router.front.messages import ChatPrompt
from router.front.ranges import BIAS, SEED_MASK, ranges
from router.front.tokenizer import check_unicode
from router.requests import Limits, SamplingParams

MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300  # as OpenAI allows
MAX_GRAMMAR_CHARACTERS = 65_536


@dataclass(frozen=True, slots=True)
class Fit:
    """A prompt that fits, and the tokens each sample may have."""

    prompt: tuple[int, ...]
    max_tokens: int


def check_model(asked: str, served: str) -> None:
    """Raises ModelNotFound."""
    if asked != served:
        raise ModelNotFound(f"the model `{_short(asked)}` does not exist here", param="model", code="model_not_found")


def check_parameters(ask: Ask, settings: RouterSettings) -> None:
    """Everything that needs neither tokenizer nor workers."""
    spelt = {"max_tokens": ask.spelling.max_tokens, "logprobs": ask.spelling.logprobs}
    for name, allowed in ranges(settings).items():
        if (value := getattr(ask, name)) is not None:
            allowed.check(spelt.get(name, name), value)
    if ask.max_tokens == 0 and not ask.echo and ask.scored is None:
        param = ask.spelling.max_tokens
        raise InvalidRequest(f"{param} can be 0 only with echo or prompt_logprobs", param=param)
    if len(ask.stop) > settings.max_stop_strings:
        raise InvalidRequest(f"at most {settings.max_stop_strings} stop strings are allowed", param="stop")
    for stop in ask.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters", param="stop")
        check_text(stop, "stop")
    if len(ask.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"at most {MAX_STOP_TOKEN_IDS} stop token ids are allowed", param="stop_token_ids")
    _check_rules(ask)
    _check_prompt(ask)


def _check_rules(ask: Ask) -> None:
    """What earlier tokens have to say about a draw: penalties, bias, min_tokens, grammar."""
    if len(ask.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"at most {MAX_LOGIT_BIAS} tokens can be biased", param="logit_bias")
    for _, bias in ask.logit_bias:
        BIAS.check("logit_bias", bias)
    if ask.grammar is not None:
        param = ask.spelling.grammar
        if len(ask.grammar.source) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(f"{param} has more than {MAX_GRAMMAR_CHARACTERS} characters", param=param)
        if ask.ignore_eos:
            raise InvalidRequest("ignore_eos contradicts a grammar, whose end is the end", param="ignore_eos")


def check_text(text: str, param: str) -> None:
    """Raises InvalidRequest naming `param` for text that is not Unicode."""
    try:
        check_unicode(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"{param}: {error.message}", param=param) from None


def check_prompt_text(prompt: Prompt, param: str) -> None:
    """Raises InvalidRequest naming `param` for a prompt whose text is not Unicode."""
    match prompt:
        case TextPrompt(text):
            check_text(text, param)
        case ChatPrompt(turns):
            for turn in turns:
                check_text(turn.content, param)


def _check_prompt(ask: Ask) -> None:
    param = ask.spelling.prompt
    match ask.prompt:
        case TextPrompt(content) | TokenPrompt(content) | ChatPrompt(content):
            empty = not content
    check_prompt_text(ask.prompt, param)
    if empty:
        raise InvalidRequest(f"{param} must not be empty", param=param)


def check_scored(asked: Iterable[tuple[Ask, int]], settings: RouterSettings) -> None:
    """How many log-probabilities the answer would have of its prompts' tokens. `asked`: with each prompt's length."""
    total, param = 0, "prompt_logprobs"
    for ask, tokens in asked:
        if ask.scored is not None:
            total, param = total + tokens * (1 + ask.scored) * (ask.n or 1), ask.spelling.scored
    if total > settings.max_prompt_logprobs:
        message = f"the answer would have {total} log-probabilities of prompt tokens, the most are"
        raise InvalidRequest(f"{message} {settings.max_prompt_logprobs}", param=param)


def fit(ask: Ask, ids: list[int] | tuple[int, ...], limits: Limits) -> Fit:
    """Whether a prompt with n answers of max_tokens fits a decode worker's pool and the context of both pools.

    An omitted max_tokens becomes what fits. The answers share the prompt's full blocks (router.requests.worst_blocks).
    """
    param = ask.spelling.prompt
    if not ids:
        raise InvalidRequest(f"{param} has no tokens", param=param)
    room, least = limits.max_context - len(ids), 0 if ask.max_tokens == 0 else 1
    if room < least:
        words = "at least one more must fit" if least else "they must fit"
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens and {words} a context of {limits.max_context}",
            param=param,
            code="context_length_exceeded",
        )
    # Only now: a list that is too long is refused before each of its ids is looked at.
    _check_ids(ids, limits.vocab_size, param)
    _check_ids(ask.stop_token_ids, limits.vocab_size, "stop_token_ids")
    _check_ids([token for token, _ in ask.logit_bias], limits.vocab_size, "logit_bias")
    n, block = ask.n or 1, limits.block_size
    shared = len(ids) // block
    private = (limits.pool_tokens // block - shared) // n
    room = min(room, (shared + private) * block - len(ids))
    if room < least:
        raise InvalidRequest(
            f"the prompt's {len(ids)} tokens and {n} answer(s) do not fit the {limits.pool_tokens} of a decode worker",
            param=param,
            code="context_length_exceeded",
        )
    if ask.max_tokens is not None and ask.max_tokens > room:
        each = f" for each of n = {n} answers" if n > 1 else ""
        param = ask.spelling.max_tokens
        raise InvalidRequest(
            f"after {len(ids)} prompt tokens {param} can be at most {room}{each}, not {ask.max_tokens}",
            param=param,
            code="context_length_exceeded",
        )
    most = room if ask.max_tokens is None else ask.max_tokens
    if (ask.min_tokens or 0) > most:
        raise InvalidRequest(f"min_tokens can be at most {most}", param="min_tokens")
    return Fit(tuple(ids), most)


def sampling(ask: Ask, limits: Limits) -> SamplingParams:
    """The sampling of a checked ask. A missing seed is drawn here, once, so that a retry draws the same tokens (I5)."""
    top_k = ask.top_k or 0
    seed = secrets.randbits(64) if ask.seed is None else ask.seed & SEED_MASK
    return SamplingParams(
        temperature=1.0 if ask.temperature is None else float(ask.temperature),
        top_p=1.0 if ask.top_p is None else float(ask.top_p),
        top_k=top_k if 0 < top_k < limits.vocab_size else 0,
        seed=seed,
        logprobs=ask.logprobs,
        presence_penalty=float(ask.presence_penalty or 0),
        frequency_penalty=float(ask.frequency_penalty or 0),
        repetition_penalty=float(ask.repetition_penalty or 1),
        min_p=float(ask.min_p or 0),
        min_tokens=ask.min_tokens or 0,
        logit_bias=ask.logit_bias,
    )


def _check_ids(ids: list[int] | tuple[int, ...], vocab_size: int, param: str) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        raise InvalidRequest(f"{param}: token ids must be 0 to {vocab_size - 1}", param=param)


def _short(name: str) -> str:
    """A client's own words in an error message: bounded."""
    return name if len(name) <= 80 else name[:77] + "..."
