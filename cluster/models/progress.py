"""How the model store tells its caller how far it is, so that a command line can draw bars."""

from __future__ import annotations

from typing import Literal, Protocol

Stage = Literal["wait", "download", "verify", "unpack", "convert"]
"""Stages in the order they run; `wait` comes only while another process pulls the same model."""


class Progress(Protocol):
    """Called often, from the thread that does the work; must be cheap and must not raise."""

    def __call__(self, stage: Stage, done: int, total: int, /) -> None:
        """`done` of `total` is finished.

        Bytes for download, verify and unpack, tensors for convert. `total` is 0 while it is unknown.
        """


def silent(stage: Stage, done: int, total: int) -> None:
    """A `Progress` that tells nobody."""
