"""Policies of tenants: what each may ask for, and with whom it shares."""

from __future__ import annotations

import pytest

from motet.errors import AdapterError, AdapterNotAllowed, InvalidRequest
from motet.params import TenantPolicy
from motet.runtime.tenants import Tenants


def tenants(**policies: TenantPolicy) -> Tenants:
    result = Tenants()
    for name, policy in policies.items():
        result.set_policy(name, policy)
    return result


def test_a_tenant_without_a_policy_may_all_and_shares_with_itself():
    nobody = tenants()
    nobody.check("x", "anything", 1 << 40)
    assert nobody.sharing_scope("x") == nobody.sharing_scope("x") != nobody.sharing_scope("y")
    plain = tenants(x=TenantPolicy())
    plain.check("x", "anything", 1 << 40)
    assert plain.sharing_scope("x") == nobody.sharing_scope("x")


def test_adapters_are_allowed_by_name_or_glob():
    some = tenants(acme=TenantPolicy(adapters=["acme-*", "shared", "odd[1]"]), none=TenantPolicy(adapters=[]))
    for name in ("acme-sql", "acme-", "shared", "odd[1]", None):
        some.check("acme", name, 0)
    for name in ("Acme-sql", "shared2", "other", "*"):
        with pytest.raises(AdapterNotAllowed, match=r"tenant 'acme' may not use .*'acme-\*', 'shared'"):
            some.check("acme", name, 0)
    some.check("none", None, 0)
    with pytest.raises(AdapterError, match="allows none"):
        some.check("none", "shared", 0)
    some.check("other", "anything", 0)


def test_priority_has_a_limit():
    some = tenants(x=TenantPolicy(max_priority=-1))
    some.check("x", None, -1)
    with pytest.raises(InvalidRequest, match="priority 0 is above -1"):
        some.check("x", None, 0)


def test_groups_share_and_no_tenants_name_is_taken_for_a_group():
    some = tenants(
        a=TenantPolicy(prefix_group="g"), b=TenantPolicy(prefix_group="g"), c=TenantPolicy(prefix_group="h")
    )
    scopes = [some.sharing_scope(name) for name in ("a", "b", "c", "g", "group:g")]
    assert scopes[0] == scopes[1] and len(set(scopes)) == 4


def test_a_new_policy_takes_the_place_of_the_old():
    some = tenants(a=TenantPolicy(prefix_group="g", adapters=["x"]))
    some.set_policy("a", TenantPolicy())
    some.check("a", "y", 0)
    assert some.sharing_scope("a") == tenants().sharing_scope("a")
