"""Places: what is counted of requests that were let in, of each tenant and of all."""

from __future__ import annotations

from dataclasses import dataclass, field

from motet.params import TenantPolicy
from motet.runtime.request import Request
from motet.runtime.statistics import Pace
from motet.runtime.token_bucket import TokenBucket


@dataclass(slots=True)
class Count:
    """What is there of a tenant, or of all. Each of a request's n outputs counts."""

    live: int = 0
    running: int = 0
    """Of requests that have begun to run, preempted ones included."""
    delayed: int = 0
    """Of requests that wait for their tenant's quota."""
    waiting_tokens: int = 0
    """Prompt tokens of requests that have not begun to run."""
    ends: Pace = field(default_factory=Pace)


@dataclass(slots=True, eq=False)
class TenantCount(Count):
    name: str = ""
    policy: TenantPolicy | None = None
    bucket: TokenBucket | None = None
    """None: no quota."""
    delayed_tokens: int = 0
    queue: list[Request] = field(default_factory=list)
    """The delayed ones that the engine thread knows: larger priority first, then in order of arrival."""
    due: float | None = None
    """When to look at the queue next; None: at no time."""


@dataclass(slots=True, eq=False)
class Place:
    """A request that was let in, until it has ended."""

    tenant: TenantCount
    num_outputs: int
    """Those that have not ended."""
    num_prompt_tokens: int | None = None
    """None until they are known."""
    num_charged: int = 0
    """Tokens that its tenant's quota was charged with for its prompt."""
    is_delayed: bool = False
    has_begun: bool = False
