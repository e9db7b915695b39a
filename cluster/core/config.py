"""The typed settings of a cluster (DESIGN §8). Frozen: one object, shared by all, changed by none (FAULTS O10).

Reading files, applying `--set` and naming the bad key live in cluster/config.py; this file only says what exists and
what is possible. Unknown keys are errors.
"""

from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cluster.core.faults import POINTS, Faults, FaultSpec

Positive = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
TenantName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


class Settings(BaseModel):
    """Base of all settings: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TracerSettings(Settings):
    """Shape and pace of the weightless tracer model (used when `model: tracer`)."""

    vocab_size: Annotated[int, Field(ge=260)] = 1024
    layers: Positive = 2
    kv_heads: Positive = 2
    max_context: Positive = 131_072
    step_s: Annotated[float, Field(ge=0)] = 0.0
    token_s: Annotated[float, Field(ge=0)] = 0.0


class EngineSettings(Settings):
    """What every engine process runs with."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    block_size: Annotated[int, Field(ge=1, le=256)] = 16
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

    replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    pool_tokens: Positive | None = Field(None, description="overrides engine.pool_tokens for this pool")
    chunk_tokens: Positive | None = Field(None, description="overrides engine.chunk_tokens for this pool")
    threads: Positive | None = Field(None, description="overrides engine.threads for this pool")


class Pools(Settings):
    prefill: PoolSettings = PoolSettings()
    decode: PoolSettings = PoolSettings()


class RouterSettings(Settings):
    """The front door."""

    replicas: Annotated[int, Field(ge=0, le=64)] = 1
    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 8001
    admin_host: str = Field("127.0.0.1", description="interface of /metrics and /status, and of probes")
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
    max_body_bytes: Positive = 4 * 1024 * 1024
    max_connections: Positive = Field(
        10_000, description="open at the same time at each of HTTP and gRPC; more are turned away"
    )
    max_n: Positive = 16
    max_choices: Positive = Field(256, description="choices of one request that has several prompts: prompts x n")
    prompts_at_once: Positive = Field(16, description="of one request's several prompts so many run at a time")
    max_logprobs: Annotated[int, Field(ge=0)] = 20
    max_prompt_logprobs: Positive = Field(
        262_144, description="of one request: (prompt tokens) x (1 + the likely ones named for each) x n"
    )
    max_stop_strings: Positive = 16
    max_attempts: Positive = 4
    tool_format: Literal["hermes", "llama3_json"] | None = Field(
        None, description="how the model writes tool calls; by default its chat template shows it"
    )
    debug_requests: Annotated[int, Field(ge=0)] = Field(
        1024, description="the most recent requests that GET /debug/requests/{id} and `headrace explain` know of"
    )
    prefix_index_entries: Annotated[int, Field(ge=1, le=1_000_000_000)] = Field(
        1_000_000, description="routing blocks of all workers that a router knows of at most; 26 bytes each when in use"
    )
    workers_file: str | None = Field(
        None, description="the workers last heard of, for a router that starts when nobody can tell; `up` sets it"
    )


class TenantSettings(Settings):
    """One tenant: who it is, its share, its limits. With any tenant configured every call needs a key."""

    keys: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = Field(
        (), description="sha256 of each of its API keys, in hex; `headrace key` makes one. The key itself is nowhere"
    )
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(1.0, description="its share of the work, relative to others")
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = Field(None, description="prompt and output tokens together")
    concurrency: Positive | None = Field(None, description="requests served at the same time")
    operator: bool = Field(False, description="its keys may also read /metrics and /status, at router.admin_port")


class PublicTlsSettings(Settings):
    """TLS of the routers' doors, HTTP and gRPC, from PEM files that are read again when they change. Unset: none."""

    cert_file: str | None = Field(None, description="the certificate, with those between it and its CA")
    key_file: str | None = None
    client_ca_file: str | None = Field(None, description="set: clients need a certificate from one of these (mTLS)")
    ca_file: str | None = Field(
        None, description="whom Headrace's own commands believe, for example `headrace generate`; unset: public ones"
    )
    server_name: str | None = Field(
        None, description="the certificate's name, for Headrace's own commands; unset: the address they dial"
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        if self.cert_file is None and self.client_ca_file is not None:
            raise ValueError("client_ca_file needs cert_file and key_file")
        return self


class InternalTlsSettings(Settings):
    """Mutual TLS of the streams between routers and workers, on top of the cluster secret. Unset: none."""

    cert_file: str | None = Field(None, description="of every program, for both sides; with the name `server_name`")
    key_file: str | None = None
    ca_file: str | None = Field(None, description="whose certificates make a member: a CA for this cluster alone")
    server_name: str = Field("headrace", description="the name in every program's certificate")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if len({self.cert_file is None, self.key_file is None, self.ca_file is None}) > 1:
            raise ValueError("cert_file, key_file and ca_file go together")
        return self


class TlsSettings(Settings):
    """What is encrypted (docs/security.md)."""

    public: PublicTlsSettings = PublicTlsSettings()
    internal: InternalTlsSettings = InternalTlsSettings()


class HandoffSettings(Settings):
    """Staging and patience of the KV path."""

    slots: Positive = 16
    slot_bytes: Annotated[int, Field(ge=256)] = Field(
        4 * 1024 * 1024, description="one staging slot; it must hold at least a block of the model"
    )
    admission_window_tokens: Positive = Field(4096, description="K: tokens a prefill worker queues beyond what runs")
    wait_line: Annotated[int, Field(ge=0)] = Field(8, description="submits a full decode worker lets wait")
    offer_timeout_s: PositiveSeconds = Field(2.0, description="no offer within max(this, 3 x eta): next prefill worker")
    read_timeout_s: PositiveSeconds = Field(5.0, description="a read that takes longer is given up, its slot set aside")
    pin_s: PositiveSeconds = Field(5.0, description="offered blocks stay unevictable this long without being taken")
    breaker_failures: Annotated[int, Field(ge=0)] = Field(
        3, description="so many hand-offs that fail in a row, and a prefill worker is left alone for a while; 0: never"
    )


class TransportSettings(Settings):
    """How KV moves between workers."""

    kind: Literal["nixl", "inprocess"] = "nixl"
    require: Literal["any", "rdma", "cuda_ipc", "shm", "tcp"] = "any"
    devices: tuple[str, ...] = ()
    port_range: tuple[Port, Port] | None = None


class TimingSettings(Settings):
    """All patience with a program that stops is `drain_s` and some more, so that nobody is killed who still drains."""

    heartbeat_s: PositiveSeconds = 0.5
    emit_interval_s: PositiveSeconds = 0.005
    suspect_s: PositiveSeconds = Field(3.0, description="silence after which a worker gets no new work")
    resume_s: PositiveSeconds = Field(
        5.0,
        description="a broken session may come back so long; then its attempts are cancelled. Routers wait half of it",
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

    redis_url: str | None = None
    fail_closed: bool = Field(
        False,
        description="while Redis is away: true refuses tenants with limits; false: each router counts for itself",
    )


class RaySettings(Settings):
    """`address` unset starts a local Ray of our own."""

    address: str | None = None
    num_cpus: Positive = 4
    redis_url: str | None = Field(None, description="where our own Ray's GCS keeps its tables, to survive its death")


class FaultSettings(Settings):
    """One fault point (cluster/core/faults.py says what each does). Exactly one of `nth` and `probability`."""

    point: str
    program: Annotated[str, Field(pattern=r"^(\*|(prefill|decode)-(\*|[0-9]+))$")] = "*"
    seconds: Annotated[float, Field(ge=0, le=3600)] | None = None
    nth: Positive | None = None
    probability: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int = 0

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

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")] = "headrace"
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
    tenants: dict[TenantName, TenantSettings] = Field({}, description="none: no keys, one anonymous tenant")
    tenants_file: str | None = Field(
        None, description="a YAML file with further tenants, read again when it changes; with it every call needs a key"
    )
    ray: RaySettings = RaySettings()
    faults: tuple[FaultSettings, ...] = Field((), description="what goes wrong on purpose (tests)")
    log_level: Literal["debug", "info", "warning", "error"] = "info"

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

    def threads(self, role: Literal["prefill", "decode"]) -> int:
        return self.pool(role).threads or self.engine.threads

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.served_name or self.model.rstrip("/").rsplit("/", 1)[-1]
