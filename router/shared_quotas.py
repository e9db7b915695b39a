"""The one place where a router meets the shared store: only for limits, only where a tenant has some (FAULTS F05)."""

from cluster.core.config import ClusterConfig
from cluster.quotas import QuotaBook


def open_shared_quotas(config: ClusterConfig) -> QuotaBook | None:
    """The limits' book in Redis when the configuration names one. Raises ConfigError."""
    if config.store.redis_url is None:
        return None
    # Imported only where it is used: a router without Redis should not pay for the client.
    from cluster.redis_store import RedisQuotas

    return RedisQuotas(config.store.redis_url, config.name)
