"""What happened to one request, as headers: HTTP response headers, SSE comments and gRPC trailing metadata alike."""

from router.requests import Trace

_PREFIX = "x-headrace-"


def trace_headers(trace: Trace) -> dict[str, str]:
    """What is known by now; an answer that goes out with its first token does not know its later timings yet.

    `timings-ms` has queue (until first placed), prefill (job sent to first token), transfer (reading and verifying),
    decode (first token to last) and others, as `name=milliseconds;...`, those of the first attempt.
    """
    if not trace.attempts:
        return {}
    headers = {
        "prefill": trace.prefill_worker,
        "decode": trace.decode_worker,
        "transport": trace.transport,
        "attempts": str(trace.attempts),
        "cached-tokens": str(trace.cached_tokens),
        "kv-bytes": str(trace.kv_bytes),
        "timings-ms": ";".join(f"{name}={value:.3f}" for name, value in trace.timings_ms.items()),
    }
    return {_PREFIX + name: value for name, value in headers.items() if value}
