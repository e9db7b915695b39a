"""Where models lie on this machine, and what a model's name means.

`<cache>/<name>/` is one converted model, a Hugging Face folder plus `source.json`, which says what it was made from. It
appears complete or not at all (see `pull`), so its presence is the whole state: no index file can disagree with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.core.errors import ModelError
from cluster.models.registry import KNOWN_MODELS, KnownModel, Registry

HubFetch = Callable[[str], Path]
"""Hub id -> folder with a snapshot of it; raises `ModelError`."""

CONVERSION = 1
"""Raised when the converter writes other bytes for the same file; older folders are then pulled again."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


@dataclass(frozen=True)
class ListedModel:
    """A line of `list_models`. `folder` is None and `size_bytes` 0 until the model is pulled."""

    name: str
    description: str
    licence: str
    folder: Path | None
    size_bytes: int


def default_cache(xdg_cache_home: str | None = None, home: Path | None = None) -> Path:
    """The user's cache folder, `~/.cache/headrace/models` unless the caller read an XDG_CACHE_HOME.

    A relative `xdg_cache_home` is ignored, as the XDG Base Directory Specification demands.
    """
    if xdg_cache_home and Path(xdg_cache_home).is_absolute():
        return Path(xdg_cache_home) / "headrace" / "models"
    return (home or Path.home()) / ".cache" / "headrace" / "models"


def source_stamp(model: KnownModel) -> str:
    """The content of `source.json`: what the folder was made from, and by which version of the converter."""
    stamp = {"requirement": model.requirement, "wheel_sha256": model.wheel_sha256, "conversion": CONVERSION}
    return json.dumps(stamp, indent=2) + "\n"


def is_pulled(model: KnownModel, cache: Path) -> bool:
    """Whether the converted folder is there, complete, and made from the pinned wheel by this converter."""
    stamp = cache / model.name / "source.json"
    if missing_files(cache / model.name) or not stamp.is_file():
        return False
    return stamp.read_text(encoding="utf-8") == source_stamp(model)


def missing_files(folder: Path) -> tuple[str, ...]:
    """What `folder` lacks to be a Hugging Face model folder; empty if it is one."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    return tuple(missing)


def fetch_from_hub(hub_id: str) -> Path:
    """A snapshot of a hub repository, in the hub library's own cache, which other tools share.

    Works without a network when the snapshot is already there. Raises `ModelError`.
    """
    # Imported here because only this path needs it and it costs every command line start 0.3 s.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(
            f"{hub_id!r} is no folder here and could not be fetched as a hub id ({_first_line(error)}); "
            "check the spelling and the network, or give the path of a folder"
        ) from error


def resolve(
    name_or_path: str, cache: Path, *, known: Registry = KNOWN_MODELS, from_hub: HubFetch = fetch_from_hub
) -> Path:
    """The Hugging Face folder that `name_or_path` means; never downloads a known model.

    1. the path of a Hugging Face folder: that folder
    2. a known name:                      its converted folder in `cache`
    3. `org/name`:                        a snapshot from the hub

    Raises `ModelError` when it is none of these, when the known model was not pulled, and for a folder that
    lacks files.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir() and not missing_files(path):
        return path
    if name_or_path in known:
        return _known_folder(known[name_or_path], cache)
    if name_or_path and path.exists():
        raise _not_a_model(path)
    if _HUB_ID.fullmatch(name_or_path):
        return _complete(from_hub(name_or_path))
    raise ModelError(
        f"no model {name_or_path!r}: it is not a folder, not a known name ({', '.join(sorted(known))}), "
        "and does not look like a hub id (org/name)"
    )


def list_models(cache: Path, *, known: Registry = KNOWN_MODELS) -> tuple[ListedModel, ...]:
    """Every known model by name, and whether it is in `cache`."""
    return tuple(_listed(known[name], cache) for name in sorted(known))


def _listed(model: KnownModel, cache: Path) -> ListedModel:
    folder = cache / model.name if is_pulled(model, cache) else None
    size = sum(file.stat().st_size for file in folder.iterdir()) if folder else 0
    return ListedModel(model.name, model.description, model.licence, folder, size)


def _known_folder(model: KnownModel, cache: Path) -> Path:
    if not is_pulled(model, cache):
        raise ModelError(f"the model {model.name!r} is not in {cache}; `headrace model pull {model.name}` fetches it")
    return cache / model.name


def _complete(folder: Path) -> Path:
    if missing_files(folder):
        raise _not_a_model(folder)
    return folder


def _not_a_model(path: Path) -> ModelError:
    if path.is_file():
        return ModelError(f"{path} is a file; give the Hugging Face folder of the model")
    return ModelError(f"{path} is not a Hugging Face model folder: it lacks {', '.join(missing_files(path))}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
