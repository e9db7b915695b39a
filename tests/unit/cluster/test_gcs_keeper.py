"""When Ray's GCS is started again, and when it must stay away."""

from collections import deque
from dataclasses import dataclass, field

import pytest

from cluster.controller import LaunchFailed
from cluster.core.clock import ManualClock
from cluster.gcs_keeper import LOOK_S, GcsKeeper
from cluster.store import StoreUnavailable
from cluster.supervisor import FIRST_BACKOFF_S, STEADY_S


@dataclass
class Scene:
    """A GCS whose lives end after `lives`, and a Redis that answers `redis`; both leave when the script is over."""

    lives: list[float]
    redis: list[bool | str] = field(default_factory=list)
    broken_starts: int = 0
    clock: ManualClock = field(default_factory=ManualClock)
    done: list[str | float] = field(default_factory=list)

    def wait(self) -> int | None:
        if self.lives:
            self.clock.advance(self.lives.pop(0))
            return -9
        self.done.append("leaving")
        return 0

    def start(self) -> None:
        if self.broken_starts:
            self.broken_starts -= 1
            self.lives.insert(0, 0.0)
            raise LaunchFailed("no memory")
        self.done.append("start")

    def there(self) -> bool:
        answer = self.redis.pop(0) if self.redis else True
        if isinstance(answer, str):
            raise StoreUnavailable(answer)
        return answer

    def pause(self, seconds: float) -> bool:
        if "leaving" in self.done:
            return True
        if seconds:
            self.done.append(seconds)
        return False


def play(scene: Scene) -> list[str | float]:
    GcsKeeper(scene, scene, scene.clock, scene.pause).run()
    return scene.done


def test_a_steady_gcs_is_started_again_at_once() -> None:
    assert play(Scene([STEADY_S, STEADY_S])) == ["start", "start", "leaving"]


def test_early_deaths_wait_longer_each_time_until_one_was_steady() -> None:
    first = FIRST_BACKOFF_S
    done = play(Scene([1.0, 1.0, 1.0, STEADY_S, 1.0]))
    assert done == [first, "start", 2 * first, "start", 4 * first, "start", "start", first, "start", "leaving"]


def test_a_start_that_fails_is_an_early_death() -> None:
    done = play(Scene([STEADY_S], broken_starts=2))
    assert done == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, "start", "leaving"]


def test_it_stays_away_until_redis_answers_and_knows_the_cluster(caplog: pytest.LogCaptureFixture) -> None:
    done = play(Scene([STEADY_S], ["nobody there", "nobody there", False, False, True]))
    assert done == [LOOK_S, LOOK_S, LOOK_S, LOOK_S, "start", "leaving"]
    assert caplog.text.count("nobody there") == 1
    assert caplog.text.count("has lost its tables") == 1


def test_leaving_ends_the_wait_for_redis() -> None:
    answers = deque([False, False, True])  # before, after the back-off, at the first look
    scene = Scene([STEADY_S], [False])
    GcsKeeper(scene, scene, scene.clock, lambda _: answers.popleft()).run()
    assert scene.done == []
    assert not answers


def test_without_redis_its_death_is_only_told(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene([STEADY_S])
    GcsKeeper(scene, None, scene.clock, scene.pause).run()
    assert scene.done == []
    assert "ray.redis_url" in caplog.text
