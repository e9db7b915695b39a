"""URLs of Redis: read, refused without being repeated, and spelt as Ray wants them."""

import pytest

from cluster.config import load_config
from cluster.core.config import ClusterConfig
from cluster.core.errors import ConfigError
from cluster.ray_environment import head_environment
from cluster.redis_url import RedisServer, parse_redis_url
from cluster.run_dir import RunDir


@pytest.mark.parametrize(
    ("url", "server", "address"),
    [
        ("redis://host", RedisServer("host", 6379), "redis://host:6379"),
        ("redis://host:1/0", RedisServer("host", 1), "redis://host:1"),
        ("rediss://u:p%40w@host:2/", RedisServer("host", 2, True, "u", "p@w"), "rediss://host:2"),
        ("redis://:pw@[::1]:3", RedisServer("::1", 3, False, "", "pw"), "redis://[::1]:3"),
    ],
)
def test_what_a_url_says(url: str, server: RedisServer, address: str) -> None:
    assert parse_redis_url(url, "key") == server
    assert server.ray_address == address


@pytest.mark.parametrize(
    "url",
    [
        "http://:hunter2@host",
        "host:6379",
        "redis://:hunter2@",
        "redis://:hunter2@host:port",
        "redis://:hunter2@[::1",
        "redis://:hunter2@host/1",
        "redis://:hunter2@host?db=1",
        "",
    ],
)
def test_what_is_refused_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match=r"ray\.redis_url") as refused:
        load_config(None, [f"ray.redis_url='{url}'"])
    assert "hunter2" not in str(refused.value)


def test_a_password_is_not_shown() -> None:
    assert "hunter2" not in repr(RedisServer("host", 1, password="hunter2"))


def test_who_joins_a_ray_does_not_say_where_it_keeps_its_tables() -> None:
    with pytest.raises(ConfigError, match=r"ray\.redis_url: not possible with ray\.address"):
        load_config(None, ["ray.redis_url=redis://h", "ray.address=h:1"])


def test_ray_hears_of_redis_and_of_a_name_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = load_config(None, ["ray.redis_url=redis://:hunter2@h:1", "name=one"])
    first, other = (RunDir(tmp_path_factory.mktemp("one")) for _ in range(2))
    for folder in (first, other):
        folder.prepare(config, None)
    variables = head_environment(first, config)
    assert variables["RAY_REDIS_ADDRESS"] == "redis://h:1"
    assert variables["RAY_external_storage_namespace"] == first.ray_namespace()
    assert variables == head_environment(first, config)
    assert first.ray_namespace().startswith("headrace-one-")
    assert first.ray_namespace() != other.ray_namespace()
    assert not {"RAY_REDIS_ADDRESS", "RAY_external_storage_namespace"} & set(head_environment(first, ClusterConfig()))
