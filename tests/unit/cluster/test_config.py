"""Configuration: what is read, what is refused, and what the refusal says."""

from pathlib import Path

import pytest

from cluster.config import dump_config, load_config, parse_config
from cluster.core.config import ClusterConfig
from cluster.core.errors import ConfigError


def test_nothing_given_is_the_defaults() -> None:
    assert load_config() == ClusterConfig()


def test_file_then_settings_in_order(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("engine: {dtype: float16, threads: 2}\npools: {decode: {replicas: 2}}\n")
    config = load_config(file, ["engine.dtype=bfloat16", "engine.dtype=float32", "pools.prefill.replicas=0"])
    assert (config.engine.dtype, config.engine.threads) == ("float32", 2)
    assert (config.pools.prefill.replicas, config.pools.decode.replicas) == (0, 2)


def test_settings_are_typed_as_in_yaml() -> None:
    settings = ["engine.poison=true", "seeds=[a:1, b:2]", "transport.port_range=[1000, 2000]", "served_name='1'"]
    config = load_config(None, [*settings, "store.redis_url=null", "timing.heartbeat_s=1e-1"])
    assert config.engine.poison is True
    assert config.seeds == ("a:1", "b:2")
    assert config.transport.port_range == (1000, 2000)
    assert (config.served_name, config.timing.heartbeat_s) == ("1", 0.1)


def test_dump_and_parse_are_inverse() -> None:
    config = load_config(None, ["pools.decode.threads=3", "transport.port_range=[1, 2]", "engine.tracer.step_s=0.5"])
    assert parse_config(dump_config(config)) == config


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("engine.dtyp=float32", ["'engine.dtyp'", "did you mean engine.dtype?"]),
        ("replicas=2", ["'replicas'", "pools.prefill.replicas", "pools.decode.replicas"]),
        ("engine.zzz=1", ["'engine.zzz'", "known keys here are", "chunk_tokens"]),
        ("engine.dtype=int3", ["engine.dtype", "'int3'", "'float32', 'bfloat16' or 'float16'"]),
        ("pools.decode.replicas=-1", ["pools.decode.replicas", "-1", "greater than or equal to 0"]),
        ("router.http_port=99999", ["router.http_port", "99999", "65535"]),
        ("engine=3", ["engine", "3"]),
        ("engine.tensor_parallel=2", ["'engine.tensor_parallel'", "known keys here are"]),  # one rank (FAULTS C08, F09)
        ("name=Not Good", ["name", "Not Good", "pattern"]),
        ("host=0.0.0.0", ["host", "0.0.0.0", "advertise"]),
        ("router.grpc_port=8000", ["router.grpc_port", "8000", "router.http_port"]),
        ("router={http_port: 0, share_ports: true}", ["router.share_ports", "port 0"]),
        ("router={admin_port: 9000, share_ports: true}", ["router.share_ports", "router.admin_port"]),
        ("timing.heartbeat_s=3", ["timing.suspect_s: 3", "timing.heartbeat_s 3", "to 6 or more", "to 1.5 or less"]),
        ("timing={heartbeat_s: 30, suspect_s: 0.2}", ["timing.suspect_s: 0.2", "timing.heartbeat_s 30", "60 or more"]),
        ("pools.decode.pool_tokens=16", ["pools.decode.pool_tokens", "16", "two blocks"]),
        ("tenants.acme.wieght=2", ["'tenants.acme.wieght'", "did you mean tenants.acme.weight?"]),
        ("tenants.Acme.weight=2", ["tenants.Acme", "pattern"]),
        ("tenants.acme.weight=0", ["tenants.acme.weight", "greater than 0"]),
        (f"tenants={{a: {{keys: [{'0' * 64}]}}, b: {{keys: [{'0' * 64}]}}}}", ["tenants.b.keys", "tenants.a"]),
        ("engine.kv_dtype=int4", ["engine.kv_dtype", "'int4'", "'int8'"]),
        ("pools.decode.kv_dtype=int8", ["pools.decode.kv_dtype: int8", "bfloat16", "handoff.convert is kv_dtype"]),
        ("handoff.convert=kv_dtype", ["handoff.convert", "nothing to convert", "bfloat16"]),
        ("engine={kv_dtype: int8, kernels: triton}", ["engine.kv_dtype: int8", "engine.kernels triton"]),
        ("engine.dtype", ["engine.dtype", "key=value"]),
        ("engine..dtype=1", ["engine..dtype", "key=value"]),
        ("engine.dtype=[", ["engine.dtype", "YAML"]),
    ],
)
def test_refusals_name_key_value_and_what_is_allowed(setting: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, [setting])
    for part in parts:
        assert part in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (["model=tracer", "engine.kv_dtype=int8"], "engine.kv_dtype: not possible with model tracer"),
        (["model=tracer", "handoff.convert=kv_dtype"], "engine.kv_dtype: not possible with model tracer"),
        (["pools.decode.kv_dtype=int8", "handoff.convert=kv_dtype", "engine.device=cuda:1"], "only CPUs convert"),
        (["pools.decode.kv_dtype=int8", "handoff.convert=kv_dtype", "engine.kernels=triton"], "int8 is not possible"),
    ],
)
def test_kv_dtypes_that_do_not_go_together(settings: list[str], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        load_config(None, settings)


def test_pools_may_store_kv_in_dtypes_of_their_own() -> None:
    config = load_config(None, ["pools.decode.kv_dtype=int8", "handoff.convert=kv_dtype"])
    assert (config.kv_dtype("prefill"), config.kv_dtype("decode")) == ("bfloat16", "int8")
    assert load_config(None, ["engine.kv_dtype=float32"]).kv_dtype("decode") == "float32"
    assert load_config(None, ["engine.dtype=float16"]).kv_dtype("prefill") == "float16"


@pytest.mark.parametrize(
    "text", ["- a\n", "engine: {\n", "model: a\nmodel: b\n", "engine: {dtype: a, dtype: b}\n", "7"]
)
def test_files_that_are_no_mapping_or_ambiguous(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(file)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_the_same_object_can_serve_every_part() -> None:
    config = load_config()
    with pytest.raises(ValueError, match="frozen"):
        config.engine.threads = 4  # type: ignore[misc]


@pytest.mark.parametrize("setting", ["tenants.acme.keys=[hr-pasted]", "tenants.acme.keys=hr-pasted"])
def test_a_key_written_where_its_digest_belongs_is_not_repeated(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"tenants\.acme\.keys") as refused:
        load_config(None, [setting])
    assert "hr-pasted" not in str(refused.value)


def test_tenants_survive_a_dump() -> None:
    config = load_config(None, ["tenants.acme.keys=[" + "ab" * 32 + "]", "tenants.acme.weight=2.5", "tenants.b={}"])
    assert parse_config(dump_config(config)) == config
    assert config.tenants["acme"].weight == 2.5
