"""How hand-offs end, in our own words: decode workers count by them, routers tell of each from the start.

docs/metrics.md explains them. They are types, so that nobody counts by a word that is not among them.
"""

from typing import Literal, get_args

Cause = Literal[
    "link lost",
    "read failed",
    "read timed out",
    "no offer in time",
    "job failed",
    "job could not run",
    "holder lost the blocks",
    "sent corrupt blocks",
    "offered other content",
    "sent other first tokens",
    "told other log-probabilities",
]
"""Why a decode worker leaves a prefill worker before its job is done."""

JobEnd = Literal["ok", "answered", "abandoned", "refused", "invalid", "deadline", Cause]
"""How a job ends that a prefill worker was given."""

Left = Literal["refused", "unusable", Cause]
"""Why a decode worker goes on to the next prefill worker; one that is unusable was not even given a job."""

LocalReason = Literal["short prompt", "no prefill worker", "no first token", Left]
"""Why a decode worker computes a prompt itself."""

JOB_ENDS: tuple[JobEnd, ...] = get_args(JobEnd)
LOCAL_REASONS: tuple[LocalReason, ...] = get_args(LocalReason)
