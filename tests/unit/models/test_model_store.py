"""What a model's name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.core.errors import ModelError
from cluster.models.registry import DEFAULT_MODEL, KNOWN_MODELS, KnownModel, known_model
from cluster.models.store import default_cache, fetch_from_hub, is_pulled, list_models, resolve, source_stamp


def _fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def _no_hub(hub_id: str) -> Path:
    raise AssertionError(f"asked the hub for {hub_id}")


def _pretend_pulled(model: KnownModel, cache: Path) -> Path:
    folder = _fill(cache / model.name, "config.json", "tokenizer.json", "model.safetensors")
    (folder / "source.json").write_text(source_stamp(model))
    return folder


def test_cache_folder() -> None:
    home = Path("/home/ada")
    assert default_cache(home=home) == Path("/home/ada/.cache/headrace/models")
    assert default_cache("", home) == Path("/home/ada/.cache/headrace/models")
    assert default_cache("/var/cache", home) == Path("/var/cache/headrace/models")
    assert default_cache("relative", home) == Path("/home/ada/.cache/headrace/models")


def test_the_default_model_is_known_and_pinned() -> None:
    model = known_model(DEFAULT_MODEL)
    assert "==" in model.requirement
    assert len(bytes.fromhex(model.wheel_sha256)) == 32
    assert all(name == entry.name for name, entry in KNOWN_MODELS.items())


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match="no known model 'smol'; the known models are: smollm2-135m"):
        known_model("smol")


def test_a_hugging_face_folder_is_itself(tmp_path: Path) -> None:
    folder = _fill(tmp_path / "model", "config.json", "tokenizer.json", "model-00001-of-00002.safetensors")
    assert resolve(str(folder), tmp_path / "cache", from_hub=_no_hub) == folder


def test_a_known_name_is_its_converted_folder(tmp_path: Path, tiny_model: KnownModel) -> None:
    folder = _pretend_pulled(tiny_model, tmp_path)
    assert resolve("tiny", tmp_path, known={"tiny": tiny_model}, from_hub=_no_hub) == folder


def test_a_known_name_that_was_not_pulled_says_how(tmp_path: Path, tiny_model: KnownModel) -> None:
    with pytest.raises(ModelError, match="`headrace model pull tiny` fetches it"):
        resolve("tiny", tmp_path, known={"tiny": tiny_model}, from_hub=_no_hub)


@pytest.mark.parametrize("damage", ["config.json", "tokenizer.json", "model.safetensors", "source.json"])
def test_an_incomplete_folder_does_not_count(damage: str, tmp_path: Path, tiny_model: KnownModel) -> None:
    folder = _pretend_pulled(tiny_model, tmp_path)
    assert is_pulled(tiny_model, tmp_path)
    (folder / damage).unlink()
    assert not is_pulled(tiny_model, tmp_path)


def test_a_folder_made_from_other_bytes_does_not_count(tmp_path: Path, tiny_model: KnownModel) -> None:
    folder = _pretend_pulled(tiny_model, tmp_path)
    (folder / "source.json").write_text(source_stamp(known_model(DEFAULT_MODEL)))
    assert not is_pulled(tiny_model, tmp_path)


def test_a_hub_id_is_fetched(tmp_path: Path) -> None:
    snapshot = _fill(tmp_path / "snapshot", "config.json", "tokenizer.json", "model.safetensors")
    asked: list[str] = []

    def from_hub(hub_id: str) -> Path:
        asked.append(hub_id)
        return snapshot

    assert resolve("org/some-Model_1.5", tmp_path, from_hub=from_hub) == snapshot
    assert asked == ["org/some-Model_1.5"]


def test_a_snapshot_without_weights_is_refused(tmp_path: Path) -> None:
    snapshot = _fill(tmp_path / "snapshot", "config.json")
    with pytest.raises(ModelError, match=r"it lacks tokenizer\.json, \*\.safetensors"):
        resolve("org/model", tmp_path, from_hub=lambda hub_id: snapshot)


def test_what_the_hub_library_says_reaches_the_user() -> None:
    # Two dots are refused before any network is touched.
    with pytest.raises(
        ModelError, match=r"'org/two\.\.dots' is no folder here and could not be fetched as a hub id \("
    ):
        fetch_from_hub("org/two..dots")


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    folder = _fill(tmp_path / "photos", "cat.png")
    with pytest.raises(ModelError, match=r"photos is not a Hugging Face model folder: it lacks config\.json"):
        resolve(str(folder), tmp_path, from_hub=_no_hub)


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = _fill(tmp_path, "model.gguf") / "model.gguf"
    with pytest.raises(ModelError, match="is a file"):
        resolve(str(file), tmp_path, from_hub=_no_hub)


@pytest.mark.parametrize(
    "name", ["", "nonsense", "/no/such/folder", "../up", "a/b/c", "a//b", "org/", "-x/y", "org/na me"]
)
def test_anything_else_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # "../up" may be a folder elsewhere
    with pytest.raises(ModelError, match=r"no model .*not a known name \(smollm2-135m\)"):
        resolve(name, tmp_path, from_hub=_no_hub)


def test_list_models(tmp_path: Path, tiny_model: KnownModel) -> None:
    known = {**KNOWN_MODELS, "tiny": tiny_model}
    before = {model.name: model for model in list_models(tmp_path, known=known)}
    assert list(before) == ["smollm2-135m", "tiny"]
    assert before["tiny"].folder is None
    assert before["tiny"].size_bytes == 0
    folder = _pretend_pulled(tiny_model, tmp_path)
    after = {model.name: model for model in list_models(tmp_path, known=known)}
    assert after["tiny"].folder == folder
    assert after["tiny"].size_bytes == 6 + len(source_stamp(tiny_model))
    assert after["smollm2-135m"].folder is None
