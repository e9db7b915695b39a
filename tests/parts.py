"""A run in parts (`pytest -n 2`): the session is the whole's, its parts only run tests."""

import pytest


def is_part(config: pytest.Config) -> bool:
    """Whether this process runs a part of the tests for another, which ends the session."""
    return hasattr(config, "workerinput")
