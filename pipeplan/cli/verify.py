"""``pipeplan verify``: whether a plan finishes, computes the right thing and fits, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeplan.cli.options import ClusterFile, Json, PlanPath, ProfileFile, Quiet
from pipeplan.plan.types import QueueModel

if TYPE_CHECKING:
    from pipeplan.plan.findings import Finding

QueueModelOption = Annotated[
    QueueModel | None,
    typer.Option("--queue-model", help="What shares the order of messages at run time; the plan's own if not given."),
]


def verify(
    plan: PlanPath,
    profile: ProfileFile = None,
    cluster: ClusterFile = None,
    queue_model: QueueModelOption = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check a plan and its program: every op and message, no deadlock, memory under the cap.

    Exits with status 1 and shows the faulty step if the plan would hang, compute something wrong, or not fit.

    Example: pipeplan verify plans/NAME
    """
    from pipeplan.cli.console import print_json, print_result
    from pipeplan.plan.findings import RefusedError
    from pipeplan.plan.folder import load_plan
    from pipeplan.program.folder import verify_loaded
    from pipeplan.program.types import Send

    loaded = load_plan(plan, profile, cluster)
    try:
        verified = verify_loaded(loaded, queue_model)
    except RefusedError as error:
        if not json:
            raise
        print_json({"verified": False, "findings": [_finding_entry(finding) for finding in error.findings]})
        raise typer.Exit(1) from None
    program = verified.program
    num_messages = sum(isinstance(step, Send) for steps in program.instructions_by_rank for step in steps)
    figures = {
        "queue_model": verified.queue_model.value,
        "num_ranks": program.num_ranks,
        "num_stages": program.num_stages,
        "num_micro_batches": program.num_micro_batches,
        "num_ops": verified.plan.order.num_ops,
        "num_messages": num_messages,
    }
    if json:
        print_json({"verified": True, "plan_digest": program.plan_digest, "program_digest": program.digest, **figures})
    elif not quiet:
        print_result(
            f"verified: {figures['num_ops']} ops and {num_messages} messages of {program.num_micro_batches} "
            f"micro-batches on {program.num_ranks} ranks finish with {verified.queue_model.value} queues"
        )


def _finding_entry(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind.value,
        "rank": finding.rank,
        "position": finding.position,
        "step": finding.step,
        "reason": finding.reason,
        "cycle": [{"rank": cell.rank, "position": cell.position} for cell in finding.cycle],
    }
