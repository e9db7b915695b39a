"""The workers last heard of: kept, read again, and never a reason to stop."""

import json
from pathlib import Path

import pytest

from router.workers_file import WorkersFile


def test_what_was_kept_is_found_by_the_next_router(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    assert WorkersFile(str(path)).load() == ()
    one = WorkersFile(str(path))
    one.keep(["b:2", "a:1"])
    assert WorkersFile(str(path)).load() == ("a:1", "b:2")
    one.keep([])  # nobody is left to tell of: those last heard of are still the best guess
    assert WorkersFile(str(path)).load() == ("a:1", "b:2")
    one.keep(["c:3"])
    assert WorkersFile(str(path)).load() == ("c:3",)
    assert [file.name for file in tmp_path.iterdir()] == ["workers.json"]


def test_an_unchanged_list_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    one = WorkersFile(str(path))
    one.keep(["a:1", "b:2"])
    path.unlink()
    one.keep(["b:2", "a:1"])
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "[", "{}", '"a:1"', '["a:1", 2]', "null", "\ud800"])
def test_nonsense_is_no_worker(tmp_path: Path, text: str) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert WorkersFile(str(path)).load() == ()


def test_without_a_path_nothing_is_kept(tmp_path: Path) -> None:
    WorkersFile(None).keep(["a:1"])
    assert WorkersFile(None).load() == ()


def test_a_folder_that_cannot_be_written_is_only_a_pity(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    WorkersFile(str(tmp_path / "nowhere" / "workers.json")).keep(["a:1"])
    assert "cannot write" in caplog.text
    path = tmp_path / "workers.json"
    path.write_text(json.dumps(["a:1"]))
    assert WorkersFile(str(path)).load() == ("a:1",)
