"""``pipeplan simulate``: what a plan would take under other costs, on another cluster or under noise."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeplan.cli.options import ClusterFile, Json, PlanPath, ProfileFile, Quiet

_NOISE = "Noise"


def simulate(
    plan: PlanPath,
    profile: ProfileFile = None,
    cluster: ClusterFile = None,
    noise: Annotated[
        float | None,
        typer.Option(
            "--noise",
            metavar="SIGMA",
            help="Standard deviation of op and message times, as a share: 0.1.",
            rich_help_panel=_NOISE,
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=2, help="Batches to draw; 1000 if not given.", rich_help_panel=_NOISE)
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Seed of the draws; 0 if not given.", rich_help_panel=_NOISE)
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict the time, bubbles and memory of a plan, under other costs, links or noise if given.

    With --noise, every op and message takes its time times a log-normal factor of mean 1, drawn anew in every batch.

    Example: pipeplan simulate plans/NAME --cluster slower-links.yaml --noise 0.1
    """
    from pipeplan.cli.console import print_json, print_message, print_result, progress
    from pipeplan.cli.render import rich_table
    from pipeplan.emit.summary import noise_summary, timeline_summary
    from pipeplan.emit.tables import bubble_table, change_sentence, memory_table, noise_table
    from pipeplan.plan.folder import load_plan
    from pipeplan.simulate import noisy_makespans
    from pipeplan.simulate import simulate as simulate_plan
    from pipeplan.simulate.noise import NUM_SAMPLES

    if noise is None and (samples is not None or seed is not None):
        raise typer.BadParameter("--samples and --seed are for noise; say how much with --noise")
    loaded = load_plan(plan, profile, cluster, allow_other_costs=True)
    timeline = simulate_plan(loaded.plan, loaded.profile, loaded.cluster)
    noisy = None
    if noise is not None:
        with progress("simulating noise", quiet=quiet):
            noisy = noisy_makespans(
                loaded.plan,
                loaded.profile,
                loaded.cluster,
                spread=noise,
                num_samples=samples or NUM_SAMPLES,
                seed=seed or 0,
            )
    if json:
        summary = timeline_summary(loaded.plan, timeline)
        print_json(summary if noisy is None else {**summary, "noise": noise_summary(noisy)})
        return
    tables = [bubble_table(loaded.plan, timeline), memory_table(timeline, loaded.cluster)]
    if noisy is not None:
        tables.append(noise_table(noisy))
    print_result(*map(rich_table, tables))
    if not quiet and loaded.plan.prediction is not None:
        print_message(change_sentence(loaded.plan.prediction, timeline))
