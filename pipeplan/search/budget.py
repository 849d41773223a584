"""How long a search may go on: by work, which is the same on every machine, or by the clock."""

from __future__ import annotations

import time

DEFAULT_WORK_LIMIT = 150_000_000
GUESSED_WORK_PER_S = 12_000_000.0
ORDER_STEP_WEIGHT = 0.2  # the clock runs an order in about a fifth of the time that scheduling one takes


class Budget:
    """Counts work (ops scheduled; ops only clocked count a fifth) and time against their limits."""

    def __init__(self, time_limit_s: float | None, work_limit: int | None) -> None:
        """Start the clock; without any limit, the default number of ops ends the search."""
        if time_limit_s is None and work_limit is None:
            work_limit = DEFAULT_WORK_LIMIT
        self.time_limit_s = time_limit_s
        self.work_limit = work_limit
        self.work = 0.0
        self._started = time.monotonic()
        self.ended_by_clock = False

    @property
    def expected_work(self) -> float:
        """How much work the limits allow, by a rough guess of the machine's speed where only the clock limits it."""
        by_time = float("inf") if self.time_limit_s is None else self.time_limit_s * GUESSED_WORK_PER_S
        return min(by_time, float("inf") if self.work_limit is None else float(self.work_limit))

    def spend(self, work: float) -> None:
        """Count work that was done."""
        self.work += work

    @property
    def fraction(self) -> float:
        """Share of the tighter limit that is used; 1 or more means that the search should end."""
        by_work = self.work / self.work_limit if self.work_limit else 0.0
        by_time = 0.0
        if self.time_limit_s is not None:
            by_time = (time.monotonic() - self._started) / self.time_limit_s if self.time_limit_s > 0 else 1.0
        if by_time >= 1.0 and by_work < 1.0:
            self.ended_by_clock = True
        return max(by_work, by_time)
