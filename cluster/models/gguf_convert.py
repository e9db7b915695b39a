"""GGUF file -> Hugging Face folder, the one format the engine and the router read.

1. read the header and the metadata        (gguf_metadata)
2. config.json, generation_config.json     (gguf_config)
3. tokenizer.json, tokenizer_config.json   (gguf_tokenizer)
4. model.safetensors in bfloat16           (gguf_tensors)

The same bytes in give the same bytes out, so two hosts that convert on their own have the same fingerprint.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cluster.models.gguf_config import generation_config, head_counts, llama_config
from cluster.models.gguf_metadata import Metadata, open_gguf
from cluster.models.gguf_tensors import write_tensors
from cluster.models.gguf_tokenizer import build_tokenizer, tokenizer_config
from cluster.models.progress import silent

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.models.gguf_config import Config
    from cluster.models.progress import Progress


def convert(gguf: Path, folder: Path, progress: Progress = silent) -> None:
    """Write the Hugging Face folder of the file `gguf` into the existing, empty `folder`.

    Not atomic: the caller gives a private folder and renames it when this returns. Raises `ModelError` when the file is
    damaged or holds a model that cannot be converted exactly.
    """
    progress("convert", 0, 0)  # parsing a vocabulary takes seconds, and how many tensors follow is not known yet
    reader = open_gguf(gguf)
    metadata = Metadata.of(reader)
    _write_json(folder / "config.json", llama_config(metadata, {tensor.name for tensor in reader.tensors}))
    _write_json(folder / "generation_config.json", generation_config(metadata))
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    write_tensors(reader, folder / "model.safetensors", *head_counts(metadata), progress)


def _write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
