"""``pipeplan simulate``: what a plan would take under other costs or on another cluster."""

from __future__ import annotations

from pipeplan.cli.options import ClusterFile, Json, PlanPath, ProfileFile, Quiet


def simulate(
    plan: PlanPath,
    profile: ProfileFile = None,
    cluster: ClusterFile = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict the time, bubbles and memory of a plan, under other costs or links if given.

    Example: pipeplan simulate plans/NAME --cluster slower-links.yaml
    """
    from pipeplan.cli.console import print_json, print_message, print_result
    from pipeplan.cli.render import rich_table
    from pipeplan.emit.summary import timeline_summary
    from pipeplan.emit.tables import bubble_table, change_sentence, memory_table
    from pipeplan.plan.folder import load_plan
    from pipeplan.simulate import simulate as simulate_plan

    loaded = load_plan(plan, profile, cluster, allow_other_costs=True)
    timeline = simulate_plan(loaded.plan, loaded.profile, loaded.cluster)
    if json:
        print_json(timeline_summary(loaded.plan, timeline))
        return
    print_result(
        rich_table(bubble_table(loaded.plan, timeline)),
        rich_table(memory_table(timeline, loaded.cluster)),
    )
    if not quiet and loaded.plan.prediction is not None:
        print_message(change_sentence(loaded.plan.prediction, timeline))
