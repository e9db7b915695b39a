"""Tokenizers of both families, against the tokenizers library itself."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from cluster.core.errors import InvalidRequest, ModelError
from router.front.tokenizer import HuggingFaceTokenizer, TracerTokenizer, label_of
from tests.unit.router_front.fold_tools import fold, groups, rules

CORPUS = ["the cat sat on the mat ", "你好 世界 Zażółć ไทย", "🌶️👩‍👩‍👧 emoji", "def f(x):\n    return x"] * 4
UNICODE = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)


def byte_level() -> RustTokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM: every byte has a token."""
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    return tokenizer


def sentencepiece_like() -> RustTokenizer:
    """As Llama 2 and Mistral: ▁ for spaces, one put before the text, bytes for what is not in the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"thecasonmd你好"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a")]
    pieces += [a + b for a, b in merges]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    bpe = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = RustTokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace() -> RustTokenizer:
    pieces = ["<unk>", "▁", *"thecasonmd你好", "th"]
    bpe = models.BPE({piece: at for at, piece in enumerate(pieces)}, [("t", "h")], unk_token="<unk>")
    tokenizer = RustTokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


Load = Callable[[RustTokenizer], HuggingFaceTokenizer]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    def save_and_load(tokenizer: RustTokenizer) -> HuggingFaceTokenizer:
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        tokenizer.save(str(path))
        return HuggingFaceTokenizer(path)

    return save_and_load


@pytest.fixture(scope="module")
def byte_level_rust() -> RustTokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def families(load: Load, byte_level_rust: RustTokenizer) -> list[HuggingFaceTokenizer]:
    return [load(byte_level_rust), load(sentencepiece_like())]


@given(text=UNICODE, places=st.lists(st.integers(0, 99), max_size=5))
@settings(max_examples=60)
def test_any_text_comes_back(families: list[HuggingFaceTokenizer], text: str, places: list[int]) -> None:
    for tokenizer in families:
        ids = tokenizer.encode(text, add_special=False)
        assert fold(rules(tokenizer=tokenizer, end_ids=[]), groups(ids, places)).text == text


@given(ids=st.lists(st.integers(0, 402), max_size=30))
@settings(max_examples=200)
def test_byte_level_reads_any_ids_as_the_library_does(
    families: list[HuggingFaceTokenizer], byte_level_rust: RustTokenizer, ids: list[int]
) -> None:
    expected = byte_level_rust.decode(ids, skip_special_tokens=True)
    assert fold(rules(tokenizer=families[0], end_ids=[]), [ids]).text == expected


@pytest.mark.parametrize("make", [sentencepiece_like, metaspace])
@pytest.mark.parametrize("text", ["the cat", " the", "t h e", "你好 the", ""])
def test_spaces_as_the_library_writes_them(load: Load, make: Callable[[], RustTokenizer], text: str) -> None:
    rust = make()
    tokenizer = load(rust)
    ids = tokenizer.encode(text, add_special=False)
    assert fold(rules(tokenizer=tokenizer, end_ids=[]), [[i] for i in ids]).text == rust.decode(ids)


def test_a_continuation_keeps_its_leading_space(load: Load) -> None:
    tokenizer = load(sentencepiece_like())
    the = tokenizer.encode("the", add_special=False)
    assert fold(rules(tokenizer=tokenizer, fresh=True), [the]).text == "the"
    assert fold(rules(tokenizer=tokenizer, fresh=False), [the]).text == " the"


def test_specials_have_no_text_and_are_added_only_when_asked(load: Load) -> None:
    tokenizer = load(byte_level())
    plain, with_bos = tokenizer.encode("cat", add_special=False), tokenizer.encode("cat", add_special=True)
    assert with_bos[1:] == plain
    assert tokenizer.token_bytes(with_bos[0]) is None
    assert tokenizer.label(with_bos[0]) == "<bos>"
    assert tokenizer.token_bytes(100_000) is None
    assert fold(rules(tokenizer=tokenizer, end_ids=[]), [with_bos]).text == "cat"


def test_an_added_token_that_is_not_special_is_text(load: Load) -> None:
    tokenizer = load(byte_level())
    ids = tokenizer.encode("a<tool call>b", add_special=False)
    assert fold(rules(tokenizer=tokenizer, end_ids=[]), [ids]).text == "a<tool call>b"


def test_stored_truncation_and_padding_are_off(load: Load) -> None:
    rust = byte_level()
    rust.enable_truncation(2)
    rust.enable_padding(length=64)
    assert 2 < len(load(rust).encode("the cat sat on", add_special=False)) < 64


@pytest.mark.parametrize("tokenizer", [TracerTokenizer(), None])
def test_lone_surrogates_are_refused(load: Load, tokenizer: TracerTokenizer | None) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        (tokenizer or load(byte_level())).encode("a\ud800", add_special=False)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
        {"type": "Replace", "pattern": {"Regex": "x+"}, "content": " "},
    ],
)
def test_a_decoder_without_bytes_per_token_is_refused(tmp_path: Path, decoder: dict[str, object] | None) -> None:
    content = json.loads(byte_level().to_str())
    content["decoder"] = decoder
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError):
        HuggingFaceTokenizer(path)


def test_a_broken_file_is_a_model_error(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ModelError, match="cannot load"):
        HuggingFaceTokenizer(path)


def test_tracer_ids_are_bytes_and_others_are_named() -> None:
    tracer = TracerTokenizer()
    assert tracer.encode("é", add_special=True) == [0xC3, 0xA9]
    assert [tracer.token_bytes(i) for i in (0xC3, 256, 1023)] == [b"\xc3", b"<256>", b"<1023>"]


def test_labels_of_broken_characters_stay_distinct() -> None:
    assert label_of("é".encode()) == "é"
    assert label_of(b"\xe4\xbd") == r"bytes:\xe4\xbd"
