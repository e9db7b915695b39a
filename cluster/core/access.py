"""Settings of who may come in and what is encrypted: tenants and certificates (docs/tenants.md, docs/security.md)."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from cluster.core.settings import Positive, Settings

TenantName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


class TenantSettings(Settings):
    """One tenant: who it is, its share, its limits. With any tenant configured every call needs a key."""

    keys: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = Field(
        (), description="sha256 of each of its API keys, in hex; `headrace key` makes one. The key itself is nowhere"
    )
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(1.0, description="its share of the work, relative to others")
    requests_per_minute: Positive | None = Field(None, description="unset: no limit, as with the other two")
    tokens_per_minute: Positive | None = Field(None, description="prompt and output tokens together")
    concurrency: Positive | None = Field(None, description="requests served at the same time")
    operator: bool = Field(
        False, description="its keys may also see the whole cluster and everybody's usage, drain and scale"
    )


class PublicTlsSettings(Settings):
    """TLS of the routers' doors, HTTP and gRPC, from PEM files that are read again when they change. Unset: none."""

    cert_file: str | None = Field(None, description="the certificate, with those between it and its CA")
    key_file: str | None = Field(None, description="its private key")
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
    key_file: str | None = Field(None, description="its private key")
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
