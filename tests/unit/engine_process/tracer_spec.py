"""The small tracer these tests share."""

from engine.messages import TracerModel

SPEC = TracerModel(vocab_size=128, max_context=64)
