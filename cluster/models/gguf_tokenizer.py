"""GGUF vocabulary -> `tokenizer.json` and `tokenizer_config.json`.

A GGUF file has no tokenizer.json: it keeps tokens, token types and merges, and *names* the pre-tokeniser
(`tokenizer.ggml.pre`), whose rules live in the programs that read the file. Ours are those of the models' own
tokenizer.json files. transformers 5 does not know `smollm` when it reads a GGUF file and leaves the digits to the GPT-2
pattern; it then differs for two or more spaces before a digit and for numerals outside ASCII, and must not be imitated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.core.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Collection

    from cluster.models.gguf_config import Config
    from cluster.models.gguf_metadata import Metadata

# llama.cpp: `enum llama_token_type` (LLAMA_TOKEN_TYPE_CONTROL, LLAMA_TOKEN_TYPE_USER_DEFINED)
_CONTROL = 3
_USER_DEFINED = 4


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The byte-level BPE tokeniser of this file; it adds no BOS and no EOS.

    Control tokens become special tokens, found in the text before anything is split; user-defined tokens are
    found too but are not special. Raises `ModelError` for a vocabulary or a pre-tokeniser that is not known.
    """
    kind = metadata.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"the GGUF file has a {kind!r} vocabulary and only 'gpt2' (byte-level BPE) can be converted")
    if metadata.flag("tokenizer.ggml.add_bos_token", False):
        raise ModelError("the GGUF file asks for a BOS token before every prompt, which cannot be converted")
    tokens = metadata.texts("tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError("the GGUF file lists a token twice in tokenizer.ggml.tokens; the file is damaged")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(metadata, vocabulary)))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata.text("tokenizer.ggml.pre"))
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.integers("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL, special=True))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED, special=False))
    return tokenizer


def tokenizer_config(metadata: Metadata) -> Config:
    """The fields transformers reads beside tokenizer.json: special tokens by name, and the chat template.

    The class is the generic one: `GPT2Tokenizer`, which SmolLM2 names, builds its own pre-tokeniser in transformers 5
    and so forgets the digits.
    """
    tokens = metadata.texts("tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: Config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": metadata.flag("tokenizer.ggml.add_space_prefix", False),
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.integer("llama.context_length"),
    }
    for field, name in names.items():
        key = f"tokenizer.ggml.{name}_token_id"
        if key in metadata:
            config[field] = _token(tokens, key, metadata.integer(key))
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata.text("tokenizer.chat_template")
    return config


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    raise ModelError(
        f"the GGUF file uses the pre-tokeniser {name!r} and only 'smollm' and 'gpt-2' can be converted; "
        "use the model's own Hugging Face folder"
    )


def _merges(metadata: Metadata, vocabulary: Collection[str]) -> list[tuple[str, str]]:
    """The merges, highest priority first. Checked here because the Rust side panics on an unknown token."""
    merges = []
    for line in metadata.texts("tokenizer.ggml.merges"):
        left, space, right = line.partition(" ")
        if not (space and left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise ModelError(f"the merge {line!r} in the GGUF file is not of two of its tokens; the file is damaged")
        merges.append((left, right))
    return merges


def _added(tokens: list[str], types: list[int], wanted: int, special: bool) -> list[AddedToken]:
    if len(types) != len(tokens):
        raise ModelError(f"the GGUF file gives {len(types)} types for {len(tokens)} tokens; the file is damaged")
    chosen = (token for token, kind in zip(tokens, types, strict=True) if kind == wanted)
    return [AddedToken(token, special=special, normalized=False) for token in chosen]


def _token(tokens: list[str], key: str, index: int) -> str:
    if not 0 <= index < len(tokens):
        raise ModelError(f"{key} in the GGUF file is {index} and there are {len(tokens)} tokens; the file is damaged")
    return tokens[index]
