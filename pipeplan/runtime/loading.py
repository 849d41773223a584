"""What a launch runs: the verified program of a plan, and what the launch is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeplan.cluster import Cluster
from pipeplan.plan.folder import PROGRAM_FILE, load_plan
from pipeplan.plan.types import Plan, QueueModel
from pipeplan.profile.types import Profile
from pipeplan.program.file import read_program
from pipeplan.program.types import Program
from pipeplan.program.verify import VerifiedProgram, verify, verify_plan

# The runtime gives every ordered pair of ranks its own group; a program lowered for a stricter model runs on it too.
_QUEUE_MODEL = QueueModel.ORDERED_PAIR


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnablePlan:
    """A verified program and what it was made for.

    Attributes:
        num_replicas: Data-parallel replicas of the plan's cluster; ``None`` takes what the launch gives.
        layer_names: Names of the profiled layers, to compare with the model that the script builds;
            ``None`` where they aren't known.
        profile, cluster: What the plan was made for, needed to derive its order for another number of micro-batches;
            ``None`` where they aren't known.
    """

    verified: VerifiedProgram
    num_replicas: int | None = None
    layer_names: tuple[str, ...] | None = None
    profile: Profile | None = None
    cluster: Cluster | None = None

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.verified.plan

    @property
    def program(self) -> Program:
        """The instructions of every rank."""
        return self.verified.program


def load_runnable_plan(folder: Path) -> RunnablePlan:
    """Load a plan folder for running.

    Raises:
        PipeplanError: A file is missing or malformed, the plan is invalid, or its program does not verify.
    """
    loaded = load_plan(folder)
    if (folder / PROGRAM_FILE).is_file():
        program = read_program(folder / PROGRAM_FILE)
        verified = verify(program, loaded.plan, loaded.profile, loaded.cluster, _QUEUE_MODEL)
    else:
        verified = verify_plan(loaded.plan, loaded.profile, loaded.cluster, _QUEUE_MODEL)
    return RunnablePlan(
        verified=verified,
        num_replicas=loaded.cluster.num_replicas,
        layer_names=tuple(layer.name for layer in loaded.profile.layers),
        profile=loaded.profile,
        cluster=loaded.cluster,
    )
