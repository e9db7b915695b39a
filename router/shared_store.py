"""The one place where a router meets the shared store: for tenants kept there, their limits and usage (FAULTS F05)."""

from cluster.core.config import ClusterConfig
from cluster.quotas import QuotaBook
from cluster.tenant_store import TenantStore
from cluster.usage import UsageBook


def open_shared_quotas(config: ClusterConfig) -> QuotaBook | None:
    """The limits' book in Redis when the configuration names one. Raises ConfigError."""
    if config.store.redis_url is None:
        return None
    # Imported only where it is used: a router without Redis should not pay for the client.
    from cluster.redis_store import RedisQuotas

    return RedisQuotas(config.store.redis_url, config.name)


def open_shared_tenants(config: ClusterConfig) -> TenantStore | None:
    """The tenants in Redis when the configuration names one for them. Raises ConfigError."""
    if config.tenants_redis_url is None:
        return None
    from cluster.redis_store import RedisTenants

    return RedisTenants(config.tenants_redis_url, config.name)


def open_shared_usage(config: ClusterConfig) -> UsageBook | None:
    """The usage book in Redis when the configuration names one. Raises ConfigError."""
    if config.store.redis_url is None:
        return None
    from cluster.redis_store import RedisUsage

    return RedisUsage(config.store.redis_url, config.name, keep_days=config.usage.keep_days)
