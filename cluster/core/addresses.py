"""Where a program is reached, and that others can dial it there (FAULTS O04: an address that nobody can dial)."""

import ipaddress

EVERY_INTERFACE = frozenset({"0.0.0.0", "::", "[::]", ""})
"""Hosts to listen on, and none to dial."""


def reached_at(address: str, own: str) -> str:
    """`address`, host:port or the beginning of a URL, with this machine's `own` address in place of every interface."""
    before, slashes, rest = address.rpartition("//")
    host, _, port = rest.rpartition(":")
    if host not in EVERY_INTERFACE:
        return address
    return f"{before}{slashes}{f'[{own}]' if ':' in own and not own.startswith('[') else own}:{port}"


def is_own_machine(host: str) -> bool:
    """Whether `host` leads back to whoever dials it: a loopback address, or the name of one."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
