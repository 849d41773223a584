"""Several searches at once, each with a seed and a process of its own; the best plan counts."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from pipeplan.cluster import Cluster
from pipeplan.errors import PipeplanError, PlanError
from pipeplan.profile.types import Profile
from pipeplan.search.optimize import optimize
from pipeplan.search.result import Progress, SearchResult

_GRACE_S = 30.0  # for searches that were interrupted to hand in what they have


class _Running(NamedTuple):
    process: SpawnProcess
    answer: Connection


def optimize_in_parallel(
    profile: Profile,
    cluster: Cluster,
    *,
    num_jobs: int,
    seed: int = 0,
    strategy: str = "default",
    on_progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> SearchResult:
    """Return the best plan of ``num_jobs`` searches with the seeds ``seed``, ``seed + 1`` and so on.

    Every search has each limit to itself, and a process that takes a core and memory of its own. The same arguments
    give the same plan, unless a clock or Ctrl-C ends a search; of plans that are as fast, the lowest seed's counts.

    Args:
        on_progress: Called as by ``optimize``, for the first search.
        options: As for ``optimize``.

    Raises:
        PlanError: Several searches with another strategy than the default, or a search ended without an answer.
        InfeasibleError: The first search found no plan within the caps.
    """
    if num_jobs == 1:
        return optimize(profile, cluster, seed=seed, strategy=strategy, on_progress=on_progress, **options)
    if strategy != "default":
        raise PlanError(f"only the default strategy searches with several seeds, not {strategy!r}; leave --jobs out")
    searches: list[_Running] = []
    try:
        searches.extend(_start(profile, cluster, {**options, "seed": seed + number}) for number in range(1, num_jobs))
        result = optimize(profile, cluster, seed=seed, on_progress=on_progress, **options)
        if result.is_optimal:
            return result
        found = _gather(searches, seed, is_over=result.was_interrupted)
    finally:
        for search in searches:
            search.process.terminate()
            search.process.join()
    return dataclasses.replace(
        result,
        plan=min((result, *found), key=lambda one: one.makespan_ns).plan,  # the first of equals
        is_deterministic=result.is_deterministic and all(one.is_deterministic for one in found),
        was_interrupted=result.was_interrupted or any(one.was_interrupted for one in found),
        num_ops_tried=result.num_ops_tried + sum(one.num_ops_tried for one in found),
    )


def _start(profile: Profile, cluster: Cluster, options: dict[str, Any]) -> _Running:
    context = multiprocessing.get_context("spawn")  # a forked process would share locks with threads it hasn't got
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_search, args=(theirs, profile, cluster, options), daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what the process begins with
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return _Running(process, ours)


def _search(answer: Connection, profile: Profile, cluster: Cluster, options: dict[str, Any]) -> None:
    """Search in a process of its own; ends without an answer where no plan was found."""
    with suppress(PipeplanError, KeyboardInterrupt):
        signal.signal(signal.SIGINT, _interrupt_once)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        result = optimize(profile, cluster, **options)
        answer.send(dataclasses.replace(result, baselines=()))  # which the first search has, too


def _interrupt_once(*_: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts all processes, and the first one does again
    raise KeyboardInterrupt


def _gather(searches: Sequence[_Running], seed: int, *, is_over: bool) -> list[SearchResult]:
    """Return what the other searches find; with ``is_over``, or on Ctrl-C, what they have by then."""
    if is_over:
        _interrupt(searches)
    found: list[SearchResult] = []
    for number, search in enumerate(searches, start=1):
        try:
            one = _answer(search, _GRACE_S if is_over else None)
        except KeyboardInterrupt:
            is_over = True
            _interrupt(searches)
            one = _answer(search, _GRACE_S)
        if one is not None:
            found.append(one)
        elif not is_over:
            search.process.join()
            if search.process.exitcode:
                raise PlanError(
                    f"the search with seed {seed + number} ended without an answer (exit status "
                    f"{search.process.exitcode}); is memory short? take fewer --jobs"
                )
    return found


def _interrupt(searches: Sequence[_Running]) -> None:
    for search in searches:
        if search.process.pid is not None and search.process.is_alive():
            os.kill(search.process.pid, signal.SIGINT)


def _answer(search: _Running, limit_s: float | None) -> SearchResult | None:
    """Return what a search found; ``None`` if it ended without a plan, or doesn't answer in time."""
    if not search.answer.poll(limit_s):
        return None
    try:
        found: SearchResult = search.answer.recv()
    except EOFError:
        return None
    return found
