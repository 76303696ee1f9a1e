"""Tenants: the policies of those who share an engine, and what they decide over a new request."""

from __future__ import annotations

from fnmatch import fnmatchcase

from motet.errors import AdapterNotAllowed, InvalidRequest
from motet.params import TenantPolicy


class Tenants:
    """Policies by tenant; one without a policy may all and shares with nobody. Any thread may use it.

    A policy is replaced whole. What is decided here holds for the requests that begin afterwards.
    """

    def __init__(self) -> None:
        self._policies: dict[str, TenantPolicy] = {}

    def set_policy(self, tenant: str, policy: TenantPolicy) -> None:
        self._policies[tenant] = policy

    def policy(self, tenant: str) -> TenantPolicy | None:
        return self._policies.get(tenant)

    def check(self, tenant: str, adapter: str | None, priority: int) -> None:
        """Raises AdapterNotAllowed or InvalidRequest if the tenant may not make such a request."""
        policy = self._policies.get(tenant)
        if policy is None:
            return
        if adapter is not None and policy.adapters is not None and not _matches(adapter, policy.adapters):
            allowed = ", ".join(map(repr, policy.adapters)) or "none"
            raise AdapterNotAllowed(
                f"tenant {tenant!r} may not use adapter {adapter!r}; its policy allows {allowed}"
            )
        if policy.max_priority is not None and priority > policy.max_priority:
            raise InvalidRequest(
                f"priority {priority} is above {policy.max_priority}, the most that tenant {tenant!r} may ask for"
            )

    def sharing_scope(self, tenant: str) -> str:
        """Who shares KV with the tenant: equal for those who do. No tenant's name can spell a group's scope."""
        policy = self._policies.get(tenant)
        if policy is None or policy.prefix_group is None:
            return f"tenant:{tenant}"
        return f"group:{policy.prefix_group}"


def _matches(adapter: str, patterns: tuple[str, ...]) -> bool:
    return any(adapter == pattern or fnmatchcase(adapter, pattern) for pattern in patterns)
