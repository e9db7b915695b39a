"""Mutants of who is believed: proofs, keys, roles, certificates, secrets, and what logs may say."""

from tests.mutants.mutant import Mutant

PROOFS = "tests/unit/cluster/test_credentials.py"
SOURCES = "tests/unit/router_front/test_tenant_sources.py"
KEYS = "tests/integration/test_api_keys.py"
STORE = "tests/contract/test_tenant_store.py"

MUTANTS = (
    Mutant(
        "accept every proof of the secret",
        "cluster/credentials.py",
        'if not same_secret(mac, self._mac("call", str(port), number, told)) or not told.isdecimal():',
        "if not told.isdecimal():",
        f"{PROOFS}::test_every_part_of_a_proof_counts",
    ),
    Mutant(
        "make proofs without the secret",
        "cluster/credentials.py",
        'return hmac.digest(self._key, "\\0".join(("headrace", *parts)).encode(), hashlib.sha256).hex()',
        'return hmac.digest(b"", "\\0".join(("headrace", *parts)).encode(), hashlib.sha256).hex()',
        f"{PROOFS}::test_a_stranger_cannot_answer",
    ),
    Mutant(
        "believe any answer to a proof",
        "cluster/credentials.py",
        "return answer is not None and same_secret(answer, self.expected)",
        "return answer is not None",
        f"{PROOFS}::test_a_stranger_cannot_answer",
    ),
    Mutant(
        "let an overheard proof be said again",
        "cluster/credentials.py",
        "self._used[number] = now",
        "self._used[number] = now - 4 * WINDOW_S",
        f"{PROOFS}::test_what_was_used_is_remembered_as_long_as_it_could_be_used",
    ),
    Mutant(
        "take a proof of any age",
        "cluster/credentials.py",
        "if abs(now - int(told)) > WINDOW_S or not self._first(number, now):",
        "if not self._first(number, now):",
        f"{PROOFS}::test_clocks_may_be_apart_but_not_far",
    ),
    Mutant(
        "let a call in that proved nothing",
        "cluster/rpc.py",
        "return None if answer is None else ((_ANSWER, answer),)",
        'return ((_ANSWER, answer or ""),)',
        "tests/contract/test_rpc.py::test_calls_without_the_secret_are_refused",
    ),
    Mutant(
        "let strangers follow health",
        "cluster/rpc.py",
        "if method == _OPEN_TO_ALL:",
        'if method.startswith("/grpc.health"):',
        "tests/contract/test_rpc.py::test_health_is_told_once_without_the_secret_and_followed_with_it",
    ),
    Mutant(
        "wait for a call's message for ever",
        "cluster/rpc.py",
        "async with asyncio.timeout(seconds):",
        "async with asyncio.timeout(None):",
        "tests/contract/test_rpc.py::test_a_call_whose_message_does_not_come_is_ended",
    ),
    Mutant(
        "accept a wrong key",
        "router/tenants.py",
        "return tenant if hmac.compare_digest(given, expected) else None",
        'return tenant or next(iter(self._by_tag.values()), (b"", None))[1]',
        f"{SOURCES}::test_keys_come_and_go_and_those_of_the_configuration_stay",
    ),
    Mutant(
        "open everything while no tenant is known",
        "router/tenants.py",
        "return self._locked or bool(self.weights)",
        "return bool(self.weights)",
        f"{SOURCES}::test_a_file_without_a_tenant_opens_nothing",
    ),
    Mutant(
        "drop the tenant's salt",
        "router/tenants.py",
        "tenant = Tenant(name, quota, _salt(name, self._secret), one.operator)",
        'tenant = Tenant(name, quota, b"", one.operator)',
        f"{KEYS}::test_a_key_is_a_tenant_and_its_salt",
    ),
    Mutant(
        "make salts that anybody can compute",
        "router/tenants.py",
        'key = hashlib.sha256((secret or "").encode()).digest()',
        'key = hashlib.sha256(b"").digest()',
        f"{KEYS}::test_salts_outlive_a_router_and_need_the_secret",
    ),
    Mutant(
        "take every tenant for an operator",
        "router/front/auth.py",
        "if not tenant_of(scope).operator:",
        "if not tenant_of(scope).name:",
        f"{KEYS}::test_what_a_tenant_may_see_is_a_list",
    ),
    Mutant(
        "take the first of two keys",
        "router/front/auth.py",
        'return given[0].decode("latin-1") if len(given) == 1 else None',
        'return given[0].decode("latin-1") if given else None',
        f"{KEYS}::test_two_headers_are_no_key",
    ),
    Mutant(
        "show everybody's numbers at the clients' port",
        "router/web.py",
        "if path in ADMIN or not path.isprintable():",
        "if not path.isprintable():",
        "tests/unit/router_front/test_doors.py::test_everybodys_numbers_are_not_where_clients_are",
    ),
    Mutant(
        "never read certificates again",
        "cluster/reread.py",
        "if stamp != self._seen:",
        "if not self._seen:",
        "tests/unit/cluster/test_tls.py::test_new_files_count_from_the_next_look_on",
    ),
    Mutant(
        "let new tenants wait for a restart",
        "router/tenant_sources.py",
        "take()",
        "pass",
        f"{SOURCES}::test_keys_come_and_go_and_those_of_the_configuration_stay",
    ),
    Mutant(
        "do not insist on clients' certificates",
        "cluster/tls.py",
        "context.verify_mode = ssl.CERT_REQUIRED",
        "context.verify_mode = ssl.CERT_OPTIONAL",
        "tests/contract/test_tls.py::test_https_with_certificates_of_clients",
    ),
    Mutant(
        "read a secret that others can read",
        "cluster/secret.py",
        "if mode & (stat.S_IRWXO | stat.S_IWGRP):  # a mounted Kubernetes secret is readable by its group",
        "if mode & stat.S_IXOTH:",
        "tests/unit/cluster/test_secret.py::test_a_file_open_to_others_is_refused",
    ),
    Mutant(
        "forget to take a revoked key away",
        "cluster/tenant_store.py",
        "kept = tuple(digest for digest in before.keys if digest != found[0])",
        "kept = before.keys",
        f"{STORE}::test_only_one_key_is_revoked_and_called_by_enough_of_it",
    ),
    Mutant(
        "let an entry in Redis have the key of a configured tenant",
        "router/tenant_sources.py",
        "elif name in own or not taken.isdisjoint(tenant.keys):",
        "elif name in own:",
        f"{STORE}::test_an_entry_that_cannot_be_used_is_left_out_and_says_nothing_secret",
    ),
    Mutant(
        "log what a foreign error says",
        "cluster/logs.py",
        'return [*lines, *([frames] if frames else []), f"{kind}: {error}" if isinstance(error, _TELL) else kind]',
        'return [*lines, *([frames] if frames else []), f"{kind}: {error}"]',
        "tests/unit/cluster/test_logs.py::test_tracebacks_do_not_repeat_what_foreign_errors_say",
    ),
)
