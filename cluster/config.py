"""From a YAML file, `--set` options and defaults to one frozen `ClusterConfig`; and the only reader of the environment.

1. parse   YAML, refusing duplicate keys
2. set     `--set a.b.c=value`, values typed as in YAML
3. check   an unknown key, a wrong type, an impossible value is a `ConfigError` naming key, value and what is allowed
"""

import difflib
import os
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from cluster.core.access import TenantName, TenantSettings
from cluster.core.addresses import EVERY_INTERFACE
from cluster.core.config import BEATS_MISSED, ClusterConfig, TimingSettings
from cluster.core.errors import ConfigError
from cluster.redis_url import parse_redis_url

SECRET_VARIABLE = "HEADRACE_SECRET"
"""The environment variable with the cluster secret, where a file cannot be mounted."""

API_KEY_VARIABLE = "HEADRACE_API_KEY"
"""A tenant's key for the command line's own questions: a secret, so no option that others could read in `ps`."""

TENANTS_VARIABLE = "HEADRACE_TENANTS"
"""Further tenants, as YAML like a `tenants_file`, where a file cannot be mounted; read at start."""

REDIS_VARIABLE, TENANTS_REDIS_VARIABLE = "HEADRACE_REDIS_URL", "HEADRACE_TENANTS_REDIS_URL"
"""`store.redis_url` and `tenants_redis_url`, with their passwords."""

RAY_REDIS_VARIABLES = "REDIS_USERNAME", "REDIS_PASSWORD"
"""For the Redis at RAY_REDIS_ADDRESS, where `headrace node head` lets Ray keep its tables. KubeRay's names for them."""

_SECRETS = {"keys", "redis_url", "tenants_redis_url"}
"""What somebody may write there by mistake, or has to write there, is not repeated in an error."""

_TENANTS = TypeAdapter(dict[TenantName, TenantSettings])


def load_config(path: Path | None = None, settings: Iterable[str] = ()) -> ClusterConfig:
    """The cluster described by the file at `path` (defaults when None), changed by `key=value` settings in order.

    Raises ConfigError.
    """
    values = _read(path) if path is not None else {}
    for setting in settings:
        _apply(values, setting)
    return _checked(values, str(path) if path is not None else "configuration")


def with_secrets_from_environment(config: ClusterConfig) -> ClusterConfig:
    """For whoever starts a cluster or a machine: programs then read these in its file. Raises ConfigError.

    Tenants come beside those of the configuration, a Redis where it names none: a command line shows what it was given
    to everybody on the machine.
    """
    changes: dict[str, object] = {}
    if text := os.environ.get(TENANTS_VARIABLE):
        changes["tenants"] = _joined(_parse(text, TENANTS_VARIABLE), config.tenants, TENANTS_VARIABLE)
    if (url := os.environ.get(REDIS_VARIABLE)) and config.store.redis_url is None:
        parse_redis_url(url, REDIS_VARIABLE)
        changes["store"] = config.store.model_copy(update={"redis_url": url})
    if (url := os.environ.get(TENANTS_REDIS_VARIABLE)) and config.tenants_redis_url is None:
        parse_redis_url(url, TENANTS_REDIS_VARIABLE)
        changes["tenants_redis_url"] = url
    return config.model_copy(update=changes)


def parse_config(text: str, origin: str = "configuration") -> ClusterConfig:
    """The cluster described by YAML text; `origin` names it in errors. Raises ConfigError."""
    return _checked(_parse(text, origin), origin)


def load_tenants(path: Path, others: Mapping[str, TenantSettings]) -> dict[str, TenantSettings]:
    """All tenants: `others`, those of the configuration, and those in the file at `path`. Raises ConfigError."""
    return _joined(_read(path), others, str(path))


def parse_tenant(name: str, values: Mapping[str, object]) -> TenantSettings:
    """One tenant as it is stored, or as the command line says. Raises ConfigError."""
    return _joined({name: dict(values)}, {}, "tenants")[name]


def parse_settings(settings: Iterable[str]) -> dict[str, object]:
    """`key=value`, typed as in YAML. Raises ConfigError."""
    values: dict[str, object] = {}
    for setting in settings:
        _apply(values, setting)
    return values


def _joined(values: dict[str, Any], others: Mapping[str, TenantSettings], origin: str) -> dict[str, TenantSettings]:
    try:
        found = _TENANTS.validate_python(values)
    except ValidationError as error:
        problems = [_explain(("tenants", *e["loc"]), e["type"], e["msg"], e["input"]) for e in error.errors()]
        raise ConfigError(f"{origin}: {'; '.join(problems)}") from None
    if twice := sorted(found.keys() & others.keys()):
        raise ConfigError(f"{origin}: {', '.join(twice)}: in the configuration's tenants too")
    every = {**others, **found}
    _check_tenants(every, origin)
    return every


def dump_config(config: ClusterConfig) -> str:
    """YAML that `parse_config` turns back into an equal object: what child programs are started with."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def secret_from_environment() -> str | None:
    """The cluster secret, when it was given as an environment variable; an empty one counts as none."""
    return os.environ.get(SECRET_VARIABLE) or None


def ray_redis_from_environment() -> tuple[str, str]:
    """User and password; empty where they are not needed."""
    username, password = (os.environ.get(name, "") for name in RAY_REDIS_VARIABLES)
    return username, password


def api_key_from_environment() -> str | None:
    """The key with which `headrace generate` asks; an empty one counts as none."""
    return os.environ.get(API_KEY_VARIABLE) or None


def cache_home_from_environment() -> str | None:
    """XDG_CACHE_HOME, a convention of the user's whole desktop and not a setting of ours."""
    return os.environ.get("XDG_CACHE_HOME") or None


def environment(extra: Mapping[str, str], *, without: tuple[str, ...] = ()) -> dict[str, str]:
    """A child process's environment: ours plus `extra`, less every variable that begins like one of `without`."""
    return {key: value for key, value in os.environ.items() if not key.startswith(without)} | dict(extra)


def export_to_libraries(variables: Mapping[str, str]) -> None:
    """Hand settings to a library of this process that takes them from the environment only (Ray's token file)."""
    os.environ.update(variables)


class _UniqueKeys(yaml.SafeLoader):
    """YAML's own loader lets the last of two equal keys win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                problem = f"the key {key!r} appears twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return _parse(text, str(path))


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        values = yaml.load(text, Loader=_UniqueKeys)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark
        where = "" if at is None else f" (line {at.line + 1}, column {at.column + 1})"
        raise ConfigError(f"{origin}: not valid YAML: {error.problem}{where}") from None  # its own text quotes the line
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: not valid YAML: {type(error).__name__}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{origin}: expected keys and values, got {type(values).__name__}")
    return values


def _apply(values: dict[str, object], setting: str) -> None:
    key, equals, text = setting.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(f"--set {setting!r}: expected key=value, for example engine.dtype=float32")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}: {text!r} is not a YAML value: {' '.join(str(error).split())}") from error
    target = values
    for part in path[:-1]:
        below = target.get(part)
        if not isinstance(below, dict):
            below = target[part] = {}
        target = below
    target[path[-1]] = value


def _checked(values: dict[str, Any], origin: str) -> ClusterConfig:
    try:
        config = ClusterConfig.model_validate(values)
    except ValidationError as error:
        problems = [_explain(e["loc"], e["type"], e["msg"], e["input"]) for e in error.errors()]
        raise ConfigError(f"{origin}: {'; '.join(problems)}") from error
    _check_together(config, origin)
    return config


def _explain(location: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    key = ".".join(str(part) for part in location)
    if kind != "extra_forbidden":
        shown = "this" if _SECRETS & set(map(str, location)) else repr(value)
        return f"{key}: {shown} is not possible: {message[0].lower()}{message[1:]}"
    known = _keys_at(location[:-1])
    group = "".join(f"{part}." for part in location[:-1])
    near = [group + name for name in difflib.get_close_matches(str(location[-1]), known, n=1)]
    near = near or _elsewhere(str(location[-1]))
    hint = f"did you mean {' or '.join(near)}?" if near else f"known keys here are {', '.join(known)}"
    return f"unknown key {key!r}: {hint}"


def _keys_at(location: tuple[int | str, ...]) -> list[str]:
    """The keys that exist below `location` ([] where it is not a group of settings)."""
    kind: object = ClusterConfig
    for part in location:
        if get_origin(kind) is dict:  # of groups by name
            kind = get_args(kind)[1]
        elif isinstance(kind, type) and issubclass(kind, BaseModel) and str(part) in kind.model_fields:
            kind = kind.model_fields[str(part)].annotation
        else:
            return []
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []


def _elsewhere(key: str, model: type[BaseModel] = ClusterConfig, prefix: str = "") -> list[str]:
    """Full names of keys called `key` in other groups: `replicas` alone means `pools.decode.replicas`."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        if name == key and prefix:
            found.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += _elsewhere(key, field.annotation, f"{prefix}{name}.")
    return found


def _check_together(config: ClusterConfig, origin: str) -> None:
    """What no single field can know."""
    if config.host in EVERY_INTERFACE:
        raise ConfigError(
            f"{origin}: host: {config.host!r} is not possible: workers advertise it to their peers, "
            "so it must be one interface's address"
        )
    ports = config.router.http_port, config.router.grpc_port
    if ports[0] == ports[1] != 0:
        raise ConfigError(f"{origin}: router.grpc_port: {ports[1]} is not possible: router.http_port is the same")
    if config.router.share_ports and 0 in ports:
        raise ConfigError(
            f"{origin}: router.share_ports: not possible with port 0, which is another one for each router"
        )
    if config.router.share_ports and config.router.admin_port:
        raise ConfigError(f"{origin}: router.share_ports: needs router.admin_port 0: that port is each router's own")
    if config.ray.redis_url is not None:
        if config.ray.address is not None:
            raise ConfigError(f"{origin}: ray.redis_url: not possible with ray.address, whose GCS is not ours")
        parse_redis_url(config.ray.redis_url, f"{origin}: ray.redis_url")
    if config.tenants_redis_url is not None:
        parse_redis_url(config.tenants_redis_url, f"{origin}: tenants_redis_url")
    _check_tenants(config.tenants, origin)
    _check_timing(config.timing, origin)
    _check_kv_dtypes(config, origin)
    roles: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
    for role in roles:
        if config.num_blocks(role) < 2:
            raise ConfigError(
                f"{origin}: pools.{role}.pool_tokens: {config.pool_tokens(role)} is not possible: "
                f"at least two blocks of {config.engine.block_size} are needed"
            )


def _check_timing(timing: TimingSettings, origin: str) -> None:
    """Who is well is never silent for long enough to be suspect, though one of its beats comes late."""
    heartbeat, suspect = timing.heartbeat_s, timing.suspect_s
    if suspect < BEATS_MISSED * heartbeat:
        raise ConfigError(
            f"{origin}: timing.suspect_s: {suspect:g} is not possible with timing.heartbeat_s {heartbeat:g}: workers "
            f"that are well would be taken for dead between two beats; set timing.suspect_s to "
            f"{BEATS_MISSED * heartbeat:g} or more, or timing.heartbeat_s to {suspect / BEATS_MISSED:g} or less"
        )


def _check_kv_dtypes(config: ClusterConfig, origin: str) -> None:
    """KV moves between pools that store it alike, or are told to convert it; not every kernel stores every dtype."""
    engine, prefill, decode = config.engine, config.kv_dtype("prefill"), config.kv_dtype("decode")
    convert = config.handoff.convert == "kv_dtype"
    named = (engine.kv_dtype, config.pools.prefill.kv_dtype, config.pools.decode.kv_dtype)
    if config.model == "tracer" and (convert or any(kind not in (None, "auto") for kind in named)):
        raise ConfigError(f"{origin}: engine.kv_dtype: not possible with model tracer, whose KV is numbers of its own")
    if prefill != decode and not convert:
        raise ConfigError(
            f"{origin}: pools.decode.kv_dtype: {decode} is not possible with {prefill} in the prefill pool: "
            "they could not exchange KV, unless handoff.convert is kv_dtype"
        )
    if convert and prefill == decode:
        raise ConfigError(f"{origin}: handoff.convert: there is nothing to convert, both pools store KV in {decode}")
    if convert and engine.device.startswith("cuda"):
        raise ConfigError(
            f"{origin}: handoff.convert: not possible with engine.device {engine.device}: only CPUs convert"
        )
    other = next((kind for kind in (prefill, decode) if kind != engine.dtype), None)
    if engine.kernels == "triton" and other is not None:
        raise ConfigError(
            f"{origin}: engine.kv_dtype: {other} is not possible with engine.kernels triton, which stores "
            f"KV in engine.dtype {engine.dtype}"
        )


def _check_tenants(tenants: Mapping[str, TenantSettings], origin: str) -> None:
    """A key says who is calling, so it belongs to one tenant."""
    owners: dict[str, str] = {}
    for name, tenant in tenants.items():
        for key in tenant.keys:
            if owners.setdefault(key, name) != name:
                raise ConfigError(f"{origin}: tenants.{name}.keys: one of them is a key of tenants.{owners[key]} too")
