"""``pipeplan optimize``: from a profile and a cluster to a plan folder that DeepSpeed trains with."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import typer

from pipeplan.cli.options import (
    ClusterFile,
    DataParallel,
    Device,
    Json,
    LinkGbPerS,
    LinkLatencyUs,
    MemoryGb,
    NumRanks,
    Quiet,
    chosen_cluster,
)

if TYPE_CHECKING:
    from pipeplan.search import Progress

_SEARCH = "Search"
Strategy = Literal[
    "default", "baselines", "octopipe", "exact"
]  # pipeplan.search.STRATEGIES, whose import help can't pay for


def optimize(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="Profile of the model's layers.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Plan folder to write.")],
    cluster: ClusterFile = None,
    ranks: NumRanks = None,
    device: Device = None,
    memory_gb: MemoryGb = None,
    link_latency_us: LinkLatencyUs = None,
    link_gb_per_s: LinkGbPerS = None,
    data_parallel: DataParallel = None,
    micro_batches: Annotated[
        int | None, typer.Option("--micro-batches", min=1, help="Micro-batches of a batch; 4 a rank if not given.")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", min=0, help="Seconds to search.", rich_help_panel=_SEARCH)
    ] = None,
    work_limit: Annotated[
        int | None,
        typer.Option(
            "--work-limit", min=1, help="Ops to simulate; the same plan on any machine.", rich_help_panel=_SEARCH
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the search.", rich_help_panel=_SEARCH)] = 0,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            min=1,
            help="Searches at once, a core and a seed each; the best plan counts.",
            rich_help_panel=_SEARCH,
        ),
    ] = 1,
    partition: Annotated[
        str | None,
        typer.Option("--partition", help="Fix the layers of each stage: 4,5,5,3.", rich_help_panel=_SEARCH),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option("--placement", help="Fix the rank of each stage: 0,1,1,0.", rich_help_panel=_SEARCH),
    ] = None,
    colocate_tied: Annotated[
        bool,
        typer.Option("--colocate-tied", help="Keep layers that share a weight on one rank.", rich_help_panel=_SEARCH),
    ] = False,
    strategy: Annotated[
        Strategy,
        typer.Option("--strategy", help="How to search; octopipe is a published tuner.", rich_help_panel=_SEARCH),
    ] = "default",
    try_all_phases: Annotated[
        bool,
        typer.Option(
            "--try-all-phases",
            help="With octopipe: when the phase its rule picks finds nothing, try the others before stopping.",
            rich_help_panel=_SEARCH,
        ),
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Prove the optimum of a small problem.", rich_help_panel=_SEARCH)
    ] = False,
    ds_config: Annotated[
        Path | None,
        typer.Option("--ds-config", metavar="BASE.json", help="DeepSpeed config whose settings to keep."),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find a plan for a model on a cluster, and write everything that trains with it.

    Ctrl-C ends the search early and keeps the best plan found so far.

    Example: pipeplan optimize profile.yaml --ranks 8 --device h100-sxm --memory-gb 80 -o plans/mine
    """
    from pipeplan.cli.console import print_json, print_message, print_result, progress
    from pipeplan.cli.render import rich_table
    from pipeplan.emit.comparison import comparison_of_search
    from pipeplan.emit.ds_config import read_base_config
    from pipeplan.emit.folder import check_replaceable, emit_plan_folder, launch_line
    from pipeplan.emit.launch import hosts_of
    from pipeplan.emit.summary import comparison_summary, timeline_summary
    from pipeplan.emit.tables import comparison_table
    from pipeplan.plan.layout import Partition, Placement
    from pipeplan.profile import read_profile
    from pipeplan.profile.states import states_of_other_replicas
    from pipeplan.program.verify import verify_plan
    from pipeplan.search import optimize_in_parallel as search
    from pipeplan.simulate import simulate

    if exact and strategy not in ("default", "exact"):
        raise typer.BadParameter(f"--exact searches with the default strategy; leave --strategy {strategy} out")
    base = None if ds_config is None else read_base_config(ds_config)
    check_replaceable(output)
    costs = read_profile(profile)
    where = chosen_cluster(
        costs,
        cluster_file=cluster,
        num_ranks=ranks,
        device=device,
        memory_gb=memory_gb,
        link_latency_us=link_latency_us,
        link_gb_per_s=link_gb_per_s,
        data_parallel=data_parallel,
    )
    hosts_of(where)  # what can't be launched is refused before the search, not after
    other_states = states_of_other_replicas(costs, where.num_replicas)
    if other_states is not None and not quiet:
        print_message(f"warning: {other_states}")
    with _Interrupts(quiet=quiet) as interrupts, progress("searching", quiet=quiet) as update:
        result = search(
            costs,
            where,
            num_micro_batches=micro_batches or _MICRO_BATCHES_PER_RANK * where.num_ranks,
            time_limit_s=time_limit,
            work_limit=work_limit,
            num_jobs=jobs,
            seed=seed,
            partition=None if partition is None else Partition.parse(partition),
            placement=None if placement is None else Placement.parse(placement),
            colocate_tied=colocate_tied,
            strategy="exact" if exact else strategy,
            try_all_phases=try_all_phases,
            on_progress=lambda state: update(_describe(state)),
        )
        interrupts.is_searching = False
        update("writing the plan")
        comparison = comparison_of_search(result)
        verified = verify_plan(result.plan, costs, where)
        emit_plan_folder(output, verified, costs, where, base_ds_config=base, comparison=comparison)
    if json:
        timeline = simulate(result.plan, costs, where)
        print_json(
            {
                "folder": str(output),
                **timeline_summary(result.plan, timeline),
                "comparison": comparison_summary(comparison),
                "is_deterministic": result.is_deterministic,
                "was_interrupted": result.was_interrupted,
                "num_ops_tried": result.num_ops_tried,
            }
        )
        return
    print_result(rich_table(comparison_table(comparison)))
    if quiet:
        return
    for note in comparison.notes:
        print_message(note)
    print_message(f"wrote {output}; train with it:\n  {launch_line(output, where)}")


_MICRO_BATCHES_PER_RANK = 4


class _Interrupts:
    """Ctrl-C while a plan is made: the first ends the search, a later one lets what was found be written all the same.

    Only one more after that leaves without a plan.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.is_searching = True
        self._is_patient = True
        self._quiet = quiet
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others can't set handlers, nor are they interrupted
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, *_: object) -> None:
        from pipeplan.cli.console import print_message

        if self.is_searching:
            self.is_searching = False
        elif self._is_patient:
            self._is_patient = False
            if not self._quiet:
                print_message("writing the plan that was found; Ctrl-C once more leaves without it")
            return
        raise KeyboardInterrupt


def _describe(state: Progress) -> str:
    best = "" if state.best_makespan_ns is None else f", best {state.best_makespan_ns / 1e6:,.1f} ms"
    return f"{state.fraction:4.0%} {state.phase}{best} (bound {state.lower_bound_ns / 1e6:,.1f} ms)"
