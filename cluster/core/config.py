"""The typed settings of a cluster (DESIGN §8). Frozen: one object, shared by all, changed by none (FAULTS O10).

Reading files, applying `--set` and naming the bad key live in cluster/config.py; this file only says what exists and
what is possible. Unknown keys are errors. Descriptions become docs/configuration.md (`headrace config --reference`).
"""

from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from cluster.core.access import TenantName, TenantSettings, TlsSettings
from cluster.core.faults import POINTS, Faults, FaultSpec
from cluster.core.settings import Port, Positive, PositiveSeconds, Settings

KvDtype = Literal["auto", "float32", "bfloat16", "int8"]

BEATS_MISSED = 2
"""A worker is not suspect before so many of its beats may have failed to come."""


class TracerSettings(Settings):
    """Shape and pace of the weightless tracer model (used when `model: tracer`)."""

    vocab_size: Annotated[int, Field(ge=260)] = Field(1024, description="tokens there are; 256 of them are the bytes")
    layers: Positive = Field(2, description="layers of its KV")
    kv_heads: Positive = Field(2, description="heads of its KV")
    max_context: Positive = Field(131_072, description="longest sequence")
    step_s: Annotated[float, Field(ge=0)] = Field(0.0, description="a step takes at least so long")
    token_s: Annotated[float, Field(ge=0)] = Field(0.0, description="and so long for each position that it computes")


class EngineSettings(Settings):
    """What every engine process runs with."""

    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="of weights and arithmetic")
    kv_dtype: KvDtype = Field(
        "auto", description="what KV is stored in; auto: `dtype`. int8 takes about half of bfloat16, scales included"
    )
    block_size: Annotated[int, Field(ge=1, le=256)] = Field(16, description="positions in a block of KV")
    pool_tokens: Positive = Field(8192, description="KV positions a worker's pool holds, rounded down to blocks")
    routing_tokens: Positive = Field(
        256, description="routers hear of cached prefixes in steps of so many positions, rounded down to blocks"
    )
    chunk_tokens: Positive = Field(256, description="positions computed per step at most, decode rows included")
    max_batch: Positive = Field(32, description="sequences decoded together at most")
    max_context: Positive | None = Field(None, description="longest sequence; the model's own limit when unset")
    local_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="share of chunk_tokens that prompts may take in a decode worker's step while streams run"
    )
    threads: Positive = Field(1, description="compute threads of one engine process")
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto: the first GPU if any, else the CPU"
    )
    kernels: Literal["auto", "native", "torch", "triton"] = Field(
        "auto",
        description="auto: triton on a GPU; native code where it was built and CPU and model allow it; else torch",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none", description="of the products' weights; both pools need the same, as it changes the KV"
    )
    verify: Literal["full", "transfer"] = Field("full", description="full: prefix hits are digested again when matched")
    poison: bool = Field(False, description="fill free blocks with NaN (tests)")
    tracer: TracerSettings = TracerSettings()


class PoolSettings(Settings):
    """One pool of workers. The controller's desired count starts here."""

    replicas: Annotated[int, Field(ge=0, le=1024)] = Field(
        1, description="workers to start with; then `headrace scale` says how many"
    )
    pool_tokens: Positive | None = Field(None, description="overrides engine.pool_tokens for this pool")
    chunk_tokens: Positive | None = Field(None, description="overrides engine.chunk_tokens for this pool")
    threads: Positive | None = Field(None, description="overrides engine.threads for this pool")
    kv_dtype: KvDtype | None = Field(
        None, description="overrides engine.kv_dtype for this pool; two that differ need handoff.convert"
    )


class Pools(Settings):
    """The two pools, each of its own size."""

    prefill: PoolSettings = PoolSettings()
    decode: PoolSettings = PoolSettings()


class RouterSettings(Settings):
    """The front door."""

    replicas: Annotated[int, Field(ge=0, le=64)] = Field(
        1, description="routers to start with; then `headrace scale` says how many"
    )
    host: str = Field("127.0.0.1", description="interface of both doors")
    http_port: Port = Field(8000, description="the OpenAI API; 0: a free one for each router")
    grpc_port: Port = Field(8001, description="the gRPC API; 0: a free one for each router")
    admin_host: str = Field("127.0.0.1", description="interface of /metrics, /status, /usage, /dashboard and probes")
    admin_port: Port = Field(0, description="their port; 0: a free one, which `headrace status` tells")
    share_ports: bool = Field(
        False, description="the routers of one host listen on the same two ports, and the kernel deals out connections"
    )
    queue_limit: Positive = Field(512, description="requests waiting for a place at most; more get 429")
    queue_tokens: Positive = Field(1_000_000, description="prompt tokens waiting for a place at most; more get 429")
    slo_ttft_s: PositiveSeconds | None = Field(
        None, description="who would wait longer for the first token gets 429 at once; unset: only deadlines count"
    )
    deadline_s: PositiveSeconds = Field(600.0, description="default deadline of a request")
    policy: Literal["cost", "round_robin", "least_loaded", "prefix"] = Field(
        "cost", description="how requests are placed on workers; all but `cost` are there to compare with"
    )
    local_max_tokens: Annotated[int, Field(ge=0)] = Field(
        64, description="with at most this many positions to compute, a decode worker prefills by itself"
    )
    max_body_bytes: Positive = Field(4 * 1024 * 1024, description="of one request; more get 413")
    max_connections: Positive = Field(
        10_000, description="open at the same time at each of HTTP and gRPC; more are turned away"
    )
    max_n: Positive = Field(16, description="`n` of one request: samples of one prompt")
    max_choices: Positive = Field(256, description="choices of one request that has several prompts: prompts x n")
    prompts_at_once: Positive = Field(16, description="of one request's several prompts so many run at a time")
    max_logprobs: Annotated[int, Field(ge=0)] = Field(20, description="likely tokens named for each position")
    max_prompt_logprobs: Positive = Field(
        262_144, description="of one request: (prompt tokens) x (1 + the likely ones named for each) x n"
    )
    max_stop_strings: Positive = Field(16, description="stop strings of one request")
    failovers_at_once: Positive = Field(
        32,
        description="requests that lost their worker or place and are computed again at a time, before new ones",
    )
    max_attempts: Positive = Field(
        4, description="so many tries that workers fail, and the request fails; not silences after it got on"
    )
    sse_keep_alive_s: Annotated[float, Field(ge=0)] = Field(
        15.0,
        description="a begun stream of events gets a comment line after such a silence, lest proxies cut it; 0: none",
    )
    tool_format: Literal["hermes", "llama3_json"] | None = Field(
        None, description="how the model writes tool calls; by default its chat template shows it"
    )
    debug_requests: Annotated[int, Field(ge=0)] = Field(
        1024, description="the most recent requests that GET /debug/requests/{id} and `headrace explain` know of"
    )
    dashboard: bool = Field(
        True, description="GET /dashboard at router.admin_port: a live page, from which operators drain and scale"
    )
    prefix_index_entries: Annotated[int, Field(ge=1, le=1_000_000_000)] = Field(
        1_000_000, description="routing blocks of all workers that a router knows of at most; 26 bytes each when in use"
    )
    workers_file: str | None = Field(
        None, description="the workers last heard of, for a router that starts when nobody can tell; `up` sets it"
    )


class HandoffSettings(Settings):
    """Staging and patience of the KV path."""

    slots: Positive = Field(16, description="staging slots of a worker")
    slot_bytes: Annotated[int, Field(ge=256)] = Field(
        4 * 1024 * 1024, description="one staging slot; it must hold at least a block of the model"
    )
    admission_window_tokens: Positive = Field(4096, description="K: tokens a prefill worker queues beyond what runs")
    wait_line: Annotated[int, Field(ge=0)] = Field(8, description="submits a full decode worker lets wait")
    offer_timeout_s: PositiveSeconds = Field(2.0, description="no offer within max(this, 3 x eta): next prefill worker")
    read_timeout_s: PositiveSeconds = Field(5.0, description="a read that takes longer is given up, its slot set aside")
    pin_s: PositiveSeconds = Field(5.0, description="offered blocks stay unevictable this long without being taken")
    convert: Literal["none", "kv_dtype"] = Field(
        "none", description="kv_dtype: a decode worker takes KV of the prefill pool's kv_dtype and stores it in its own"
    )
    breaker_failures: Annotated[int, Field(ge=0)] = Field(
        3, description="so many hand-offs that fail in a row, and a prefill worker is left alone for a while; 0: never"
    )


class TransportSettings(Settings):
    """How KV moves between workers."""

    kind: Literal["nixl", "inprocess"] = Field("nixl", description="inprocess: all in one process (tests)")
    require: Literal["any", "rdma", "cuda_ipc", "shm", "tcp"] = Field(
        "any", description="workers refuse to run on anything slower, instead of falling back to TCP without a word"
    )
    devices: tuple[str, ...] = Field(
        (), description="UCX devices, for example `mlx5_0:1` or `eth0`; empty: UCX chooses"
    )
    port_range: tuple[Port, Port] | None = Field(
        None, description="where UCX listens, first and last; unset: anywhere (docs/security.md)"
    )


class TimingSettings(Settings):
    """Rhythms and patience, in seconds.

    All patience with a program that stops is `drain_s` and some more, so that nobody is killed who still drains.
    """

    heartbeat_s: PositiveSeconds = Field(0.5, description="a worker tells every router its status so often")
    emit_interval_s: PositiveSeconds = Field(
        0.005, description="a worker sends a router one message of tokens so often"
    )
    suspect_s: PositiveSeconds = Field(
        3.0,
        description="a worker silent so long (one seen to beat more slowly than heartbeat_s: longer in proportion, at "
        "most three times this) gets no new work; on every stream: its work goes elsewhere. At least 2 x heartbeat_s",
    )
    resume_s: PositiveSeconds = Field(
        5.0,
        description="a broken session may come back so long; then its attempts are cancelled. Routers wait half of it",
    )
    comeback_s: PositiveSeconds = Field(
        60.0, description="with no decode worker left that could go on with it, a stream that has begun waits so long"
    )
    drain_s: PositiveSeconds = Field(
        30.0, description="what runs on a program that was told to stop may go on so long; then it is handed over"
    )

    @property
    def program_stop_s(self) -> float:
        """A program that has not left so long after SIGTERM cancels itself."""
        return self.drain_s + 5.0

    @property
    def supervisor_stop_s(self) -> float:
        """Its supervisor kills it so long after SIGTERM."""
        return self.drain_s + 10.0

    @property
    def pod_stop_s(self) -> float:
        """Kubernetes' grace period. `headrace leave` has 20 s to start, to be heard, and for endpoints to go."""
        return self.supervisor_stop_s + 20.0

    @property
    def cluster_stop_s(self) -> float:
        """All programs stop at the same time; so long after they were told, Ray is taken down with what is left."""
        return self.drain_s + 20.0


class StoreSettings(Settings):
    """Shared state: in-process unless a Redis URL is given."""

    redis_url: str | None = Field(
        None, description="`redis://:password@host:6379`, `rediss://` for TLS; unset: no Redis"
    )
    fail_closed: bool = Field(
        False,
        description="while Redis is away: true refuses tenants with limits; false: each router counts for itself",
    )


class TracingSettings(Settings):
    """OpenTelemetry spans of requests (docs/tracing.md). Needs `pip install headrace[tracing]`. Unset: off."""

    otlp_endpoint: str | None = Field(None, description="host:port of an OTLP collector's gRPC port")
    insecure: bool = Field(False, description="without TLS to it")
    sample_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.01, description="of requests that bring no trace of their own; those that do decide for themselves"
    )
    trust_parent: bool = Field(
        True,
        description="false, for a public door: a caller's trace is only linked to, and `sample_share` decides of all",
    )


Price = Annotated[Decimal, Field(ge=0, le=1_000_000, allow_inf_nan=False)]


class PriceSettings(Settings):
    """What a model's tokens cost, per million."""

    input: Price = Field(description="prompt tokens that were computed")
    cached: Price | None = Field(None, description="prompt tokens that nobody computed; unset: as `input`")
    output: Price = Field(description="tokens of answers")


class UsageSettings(Settings):
    """What tenants used, and what it costs (docs/usage.md)."""

    currency: Annotated[str, Field(pattern=r"^[A-Za-z]{1,16}$")] = Field(
        "EUR", description="a word beside every amount; nothing is converted"
    )
    prices: dict[str, PriceSettings] = Field({}, description="by model's name; `*`: every other")
    keep_days: Annotated[int, Field(ge=7, le=3660)] = Field(400, description="in Redis, of each day")

    def price_of(self, model: str) -> PriceSettings | None:
        """None: it has no price."""
        return self.prices.get(model) or self.prices.get("*")


class RaySettings(Settings):
    """`address` unset starts a local Ray of our own."""

    address: str | None = Field(None, description="host:port of a Ray that runs already; unset: our own")
    num_cpus: Positive = Field(4, description="of our own Ray: places that actors ask for, no limit of what they use")
    redis_url: str | None = Field(None, description="where our own Ray's GCS keeps its tables, to survive its death")


class FaultSettings(Settings):
    """One fault point (cluster/core/faults.py says what each does). Exactly one of `nth` and `probability`."""

    point: str = Field(description="which one")
    program: Annotated[str, Field(pattern=r"^(\*|(prefill|decode)-(\*|[0-9]+))$")] = Field(
        "*", description="where: `decode-0`, `prefill-*`, or `*` for all workers"
    )
    seconds: Annotated[float, Field(ge=0, le=3600)] | None = Field(None, description="how long, for points that last")
    nth: Positive | None = Field(None, description="at this occurrence, once in a life of the program")
    probability: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="at each occurrence, with this chance"
    )
    seed: int = Field(0, description="of that chance")

    @field_validator("point")
    @classmethod
    def _known(cls, point: str) -> str:
        if point not in POINTS:
            raise ValueError(f"the fault points are {', '.join(POINTS)}")
        return point

    @model_validator(mode="after")
    def _complete(self) -> Self:
        point = POINTS[self.point]
        if point.timed != (self.seconds is not None):
            raise ValueError(f"{self.point} {'needs' if point.timed else 'has no'} `seconds`")
        if (self.nth is None) == (self.probability is None):
            raise ValueError("give exactly one of `nth` and `probability`")
        if self.program != "*" and not self.program.startswith(point.roles):
            raise ValueError(f"{self.point} exists on {' and '.join(point.roles)} workers only")
        return self


class ClusterConfig(Settings):
    """One cluster: one base model, two pools, routers."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")] = Field(
        "headrace", description="the cluster's: `headrace status --name`, its run directory, its keys in Redis"
    )
    model: str = Field("smollm2-135m", description="a known name, a Hugging Face folder, a hub id, or `tracer`")
    served_name: str | None = Field(None, description="the model's name in the API; defaults to the model's own")
    host: str = Field("127.0.0.1", description="interface that workers bind and advertise")
    secret_file: str | None = Field(None, description="file with the cluster secret (mode 0600)")
    seeds: tuple[str, ...] = Field((), description="host:port of workers to find without a controller")
    engine: EngineSettings = EngineSettings()
    pools: Pools = Pools()
    router: RouterSettings = RouterSettings()
    handoff: HandoffSettings = HandoffSettings()
    transport: TransportSettings = TransportSettings()
    tls: TlsSettings = TlsSettings()
    timing: TimingSettings = TimingSettings()
    store: StoreSettings = StoreSettings()
    tracing: TracingSettings = TracingSettings()
    usage: UsageSettings = UsageSettings()
    tenants: dict[TenantName, TenantSettings] = Field({}, description="none: no keys, one anonymous tenant")
    tenants_file: str | None = Field(
        None, description="a YAML file with further tenants, read again when it changes; with it every call needs a key"
    )
    tenants_redis_url: str | None = Field(
        None,
        description="a Redis with further tenants (`headrace key --redis`), read every second; calls need keys",
    )
    ray: RaySettings = RaySettings()
    faults: tuple[FaultSettings, ...] = Field((), description="what goes wrong on purpose (tests)")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="of every program's log")
    log_format: Literal["plain", "json"] = Field("plain", description="of every program's log: lines, or JSON objects")

    def pool(self, role: Literal["prefill", "decode"]) -> PoolSettings:
        return self.pools.prefill if role == "prefill" else self.pools.decode

    def pool_tokens(self, role: Literal["prefill", "decode"]) -> int:
        return self.pool(role).pool_tokens or self.engine.pool_tokens

    def faults_of(self, program: str) -> Faults:
        """What goes wrong on purpose in one program."""
        mine = [f for f in self.faults if fnmatchcase(program, f.program)]
        return Faults([FaultSpec(f.point, f.seconds or 0.0, f.nth, f.probability, f.seed) for f in mine])

    def num_blocks(self, role: Literal["prefill", "decode"]) -> int:
        """Blocks of one worker's pool."""
        return self.pool_tokens(role) // self.engine.block_size

    @property
    def routing_stride(self) -> int:
        """Blocks of a chain from one routing block to the next."""
        return max(1, self.engine.routing_tokens // self.engine.block_size)

    def chunk_tokens(self, role: Literal["prefill", "decode"]) -> int:
        return self.pool(role).chunk_tokens or self.engine.chunk_tokens

    def kv_dtype(self, role: Literal["prefill", "decode"]) -> str:
        """What one pool's workers store KV in."""
        wanted = self.pool(role).kv_dtype or self.engine.kv_dtype
        return self.engine.dtype if wanted == "auto" else wanted

    def threads(self, role: Literal["prefill", "decode"]) -> int:
        return self.pool(role).threads or self.engine.threads

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.served_name or self.model.rstrip("/").rsplit("/", 1)[-1]
