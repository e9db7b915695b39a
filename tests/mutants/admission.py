"""Mutants of admission: shares, order, estimates, limits, keys."""

from tests.mutants.mutant import Mutant

FAIRNESS = "tests/unit/router_core/test_fairness.py"
QUEUE = "tests/unit/router_core/test_router_queue.py"
QUOTAS = "tests/contract/test_quotas.py"
KEYS = "tests/integration/test_api_keys.py"

MUTANTS = (
    Mutant(
        "give every tenant the same share",
        "router/fairness.py",
        "self._counters[flow] = self[flow] + work / self.weight(flow)",
        "self._counters[flow] = self[flow] + work",
        f"{FAIRNESS}::test_who_always_has_something_waiting_gets_work_by_weight",
    ),
    Mutant(
        "let a tenant save up what it did not ask for",
        "router/fairness.py",
        "return max(self[flow], min(floors, default=0.0))",
        "return self[flow]",
        f"{FAIRNESS}::test_a_tenant_that_asked_for_nothing_has_saved_nothing",
    ),
    Mutant(
        "never charge the length of answers",
        "router/fairness.py",
        "return prompt_tokens + OUTPUT_WEIGHT * output_tokens",
        "return float(prompt_tokens)",
        f"{FAIRNESS}::test_answers_longer_than_expected_are_paid_for",
    ),
    Mutant(
        "keep the charge of a place that came to nothing",
        "router/lanes.py",
        "self.charge(entry, 0.0)",
        "pass",
        f"{FAIRNESS}::test_what_was_charged_for_a_place_that_came_to_nothing_is_given_back",
    ),
    Mutant(
        "let the higher number go first",
        "router/lanes.py",
        "return self.priority, self.arrival",
        "return -self.priority, self.arrival",
        f"{FAIRNESS}::test_priorities_order_the_requests_of_one_tenant_and_give_no_larger_share",
    ),
    Mutant(
        "let one tenant fill the line",
        "router/queue.py",
        "too_many = lane.requests >= most * (bounds.requests - waiting)",
        "too_many = False",
        f"{QUEUE}::test_no_tenant_fills_the_line_alone_and_who_has_nothing_in_it_gets_a_place",
    ),
    Mutant(
        "forget the pace whenever nobody waits",
        "router/drain.py",
        "self._busy_s = self._busy(now)",
        "pass",
        f"{QUEUE}::test_a_line_that_was_empty_for_a_moment_is_no_new_one",
    ),
    Mutant(
        "take a line that stands for a moment for one that stands for ever",
        "router/drain.py",
        "return None if wait is None else wait * (1 - 1 / math.sqrt(1 + departures))",
        "return wait",
        f"{QUEUE}::test_a_line_that_stands_for_a_while_rules_nobody_out_by_a_deadline",
    ),
    Mutant(
        "keep who was sent to a worker that had no room waiting in any case",
        "router/hearing.py",
        "self._endings.finish(follow, error, now)  # room will come too late",
        "pass",
        "tests/unit/router_core/test_overload.py::test_longer_answers_at_the_same_rate_are_refused_early_and_not_felt_as_waiting",
    ),
    Mutant(
        "let a ready worker go while others start",
        "cluster/reconcile.py",
        'have[role_of(name)].append((not ready, int(name.rpartition("-")[2])))',
        'have[role_of(name)].append((False, int(name.rpartition("-")[2])))',
        "tests/unit/cluster/test_reconcile.py::test_a_pool_does_not_lose_its_only_ready_worker_while_others_start",
    ),
    Mutant(
        "let permits of dead routers count for ever",
        "cluster/quotas.py",
        "if limit is not None and sum(until > now for until in account.permits.values()) >= limit:",
        "if limit is not None and len(account.permits) >= limit:",
        f"{QUOTAS}::test_permits_of_a_router_that_died_run_out_and_those_renewed_do_not",
    ),
    Mutant(
        "let a bucket save up more than a minute's worth",
        "cluster/quotas.py",
        "return min(float(self.per_minute), self.level + max(0.0, now - self.at) * self.per_minute / MINUTE_S)",
        "return self.level + max(0.0, now - self.at) * self.per_minute / MINUTE_S",
        f"{QUOTAS}::test_requests_per_minute_come_back_steadily",
    ),
    Mutant(
        "open every path that begins like an open one",
        "router/front/auth.py",
        'if scope["type"] == "http" and scope["path"] in OPEN and scope["method"] in ("GET", "HEAD"):',
        'if scope["type"] == "http" and scope["path"].startswith(tuple(OPEN)):',
        f"{KEYS}::test_every_route_in_every_spelling_needs_a_key",
    ),
    Mutant(
        "give all tenants one salt",
        "router/tenants.py",
        'return hashlib.blake2b(name.encode(), digest_size=_SALT_BYTES, key=key, person=b"headrace-tenant").digest()',
        'return hashlib.blake2b(b"", digest_size=_SALT_BYTES, key=key, person=b"headrace-tenant").digest()',
        f"{KEYS}::test_a_key_is_a_tenant_and_its_salt",
    ),
    Mutant(
        "tell tenants of each other's requests",
        "router/front/http_debug.py",
        "return [record for record in records if tenant.operator or record.tenant == tenant.name]",
        "return list(records)",
        f"{KEYS}::test_a_request_is_known_to_its_tenant_and_to_operators_alone",
    ),
)
