"""Fields that are not taken: internals of ours and of other split servers, and parts of the API that are not built.

A field that is silently ignored gives an answer that the client did not ask for (FAULTS C15, C21), so what changes
the answer is refused by name unless its value asks for nothing.
"""

from cluster.core.errors import InvalidRequest

INTERNAL = frozenset(
    {
        "attempt", "block_ids", "block_keys", "bootstrap_host", "bootstrap_port", "bootstrap_room", "cache_salt",
        "decode", "decode_worker", "disagg_params", "disaggregated_params", "emitted", "epoch", "fingerprint",
        "kv_transfer_params", "local_max_tokens", "prefill", "prefill_worker", "salt", "tenant",
    }
)  # fmt: skip

NEUTRAL: dict[str, tuple[object, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # what other OpenAI-compatible servers add and clients therefore send
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "guided_whitespace_pattern": (),
    "length_penalty": (1,),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Field -> values that ask for nothing; null always does."""


def refuse_unsupported(fields: dict[str, object]) -> None:
    """Raises InvalidRequest naming the first field that cannot be honoured."""
    for name, value in fields.items():
        if name in INTERNAL:
            raise InvalidRequest(
                f"{name} is internal and not taken from clients", param=name, code="internal_parameter"
            )
        if name in NEUTRAL and value is not None and not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            raise InvalidRequest(f"{name} is not supported yet", param=name, code="unsupported_parameter")


def _same(value: object, neutral: object) -> bool:
    """Equality that does not take false for 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
