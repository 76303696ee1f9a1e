"""TokenBucket: so many tokens a second, and some saved up."""

from __future__ import annotations


class TokenBucket:
    """Fills at `rate` tokens a second up to `burst`, and is full at first.

    What was used is known late and may be more than there is: the bucket then owes, and whoever comes next waits.
    Times are in seconds on any scale that does not go back. Kept as the one moment when it will be full again, so
    that asking changes nothing.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self._full_at = now

    def level(self, now: float) -> float:
        """Tokens that it holds; negative while it owes."""
        return self.burst - self.rate * max(0.0, self._full_at - now)

    def due(self, num_tokens: int, *, behind: int = 0) -> float:
        """When so many can be taken, after `behind` others have been. More than `burst` go when it is full."""
        return self._full_at + (behind + min(num_tokens, self.burst) - self.burst) / self.rate

    def take(self, num_tokens: int, now: float) -> None:
        self._full_at = max(self._full_at, now) + num_tokens / self.rate

    def give_back(self, num_tokens: int) -> None:
        """Of tokens that were taken and not used."""
        self._full_at -= num_tokens / self.rate

    def change(self, rate: float, burst: float, now: float) -> None:
        """Other limits; what was used stays used."""
        missing = self.burst - self.level(now)
        self.rate, self.burst = rate, burst
        self._full_at = now + missing / rate
