"""`headrace config`: is this file right, and what does it come to? And the reference of all settings."""

from pathlib import Path
from typing import Annotated

import typer

from cluster.config import dump_config, load_config, with_secrets_from_environment
from cluster.redis_url import without_password


def config(
    file: Annotated[Path | None, typer.Option("--file", "-f", help="cluster.yaml; defaults apply without one")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value, as for `headrace up`")] = None,
    all_settings: Annotated[bool, typer.Option("--reference", help="print docs/configuration.md instead")] = False,
) -> None:
    """Check a configuration and print every setting that a cluster would be started with; passwords are left out."""
    if all_settings:
        from cluster.reference import reference  # the schema of everything: no other command needs it

        print(reference(), end="")
        return
    checked = with_secrets_from_environment(load_config(file, settings or ()))
    hidden = {
        "store": checked.store.model_copy(update={"redis_url": without_password(checked.store.redis_url)}),
        "ray": checked.ray.model_copy(update={"redis_url": without_password(checked.ray.redis_url)}),
        "tenants_redis_url": without_password(checked.tenants_redis_url),
    }
    print(dump_config(checked.model_copy(update=hidden)), end="")
