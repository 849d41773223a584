"""A random generator that compiled loops carry along: the same seed gives the same search on every machine."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


def random_state(seed: int) -> NDArray[np.uint64]:
    """Return a state for the compiled functions below, [1]."""
    return np.random.SeedSequence(seed).generate_state(1, dtype=np.uint64) | np.uint64(1)


@njit(cache=True)
def uniform(state):  # type: ignore[no-untyped-def]
    """Return a float in [0, 1) and advance the state (xorshift64*, Marsaglia 2003, Vigna 2016)."""
    word = state[0]
    word ^= word >> np.uint64(12)
    word ^= word << np.uint64(25)
    word ^= word >> np.uint64(27)
    state[0] = word
    return np.float64((word * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@njit(cache=True)
def below(state, count):  # type: ignore[no-untyped-def]
    """Return a whole number in [0, count)."""
    return np.int64(uniform(state) * count)


@njit(cache=True)
def bell(state):  # type: ignore[no-untyped-def]
    """Return a float from a bell curve of mean 0 and standard deviation 1."""
    total = 0.0
    for _ in range(4):
        total += uniform(state)
    return (total - 2.0) * 1.7320508075688772
