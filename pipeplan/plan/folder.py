"""The plan folder: the unit that every command takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeplan.cluster import Cluster, equal_ranks, read_cluster, write_cluster
from pipeplan.errors import ClusterError, FileFormatError, PlanError, ProfileError
from pipeplan.plan.file import read_plan, write_plan
from pipeplan.plan.types import Plan
from pipeplan.profile.file import profile_digest, read_profile, write_profile
from pipeplan.profile.types import Profile

PLAN_FILE = "plan.yaml"
PROFILE_FILE = "profile.yaml"
CLUSTER_FILE = "cluster.yaml"
PROGRAM_FILE = "program.yaml"


@dataclass(frozen=True, slots=True)
class LoadedPlan:
    """A plan and what it is for.

    Attributes:
        folder: The plan folder, or ``None`` where a plan file was named.
    """

    plan: Plan
    profile: Profile
    cluster: Cluster
    folder: Path | None


def load_plan(
    path: Path,
    profile_path: Path | None = None,
    cluster_path: Path | None = None,
    *,
    allow_other_costs: bool = False,
) -> LoadedPlan:
    """Load PLAN: a plan folder, or a plan file with a profile.

    Without a cluster file the plan's ranks are equal devices of the profile's type, with free links and no memory cap.

    Args:
        allow_other_costs: Take a profile whose figures differ from the ones the plan was made for; the
            layers must still be as many.

    Raises:
        FileFormatError: A file is missing, malformed, truncated or of another format.
        PlanError: The plan is of another profile.
        ProfileError: The profile covers several device types and no cluster says which one.
        ClusterError: The cluster has another number of ranks than the plan.
    """
    folder = path if path.is_dir() else None
    if folder is not None:
        if not (folder / PLAN_FILE).is_file():
            raise FileFormatError(f"{folder} holds no {PLAN_FILE}; name a plan folder, or a plan file with --profile")
        plan_path = folder / PLAN_FILE
        profile_path = profile_path or folder / PROFILE_FILE
        if cluster_path is None and (folder / CLUSTER_FILE).is_file():
            cluster_path = folder / CLUSTER_FILE
    else:
        plan_path = path
    plan = read_plan(plan_path)
    if profile_path is None:
        raise FileFormatError(f"{path} is a plan file; add --profile FILE, or name a plan folder")
    profile = read_profile(profile_path)
    check_same_model(plan, plan_path, profile, profile_path, allow_other_costs=allow_other_costs)
    if cluster_path is None:
        cluster = _default_cluster(plan, profile, profile_path)
    else:
        cluster = read_cluster(cluster_path)
        if cluster.num_ranks != plan.num_ranks:
            raise ClusterError(f"{cluster_path} has {cluster.num_ranks} ranks; {plan_path} is for {plan.num_ranks}")
    return LoadedPlan(plan, profile, cluster, folder)


def write_plan_folder(plan: Plan, profile: Profile, cluster: Cluster, folder: Path) -> None:
    """Write the plan with copies of the profile and the cluster, each file whole or not at all."""
    write_profile(profile, folder / PROFILE_FILE)
    write_cluster(cluster, folder / CLUSTER_FILE)
    write_plan(plan, folder / PLAN_FILE)


def check_same_model(
    plan: Plan, plan_path: Path, profile: Profile, profile_path: Path, *, allow_other_costs: bool = False
) -> None:
    """Check that a plan belongs to a profile.

    Raises:
        PlanError: The profile has another number of layers or, unless allowed, other costs than the plan records.
    """
    if plan.partition.num_layers != profile.num_layers:
        raise PlanError(
            f"{plan_path} partitions {plan.partition.num_layers} layers; {profile_path} ({profile.model}) has "
            f"{profile.num_layers}: it is the profile of another model"
        )
    if allow_other_costs or plan.profile_digest is None:
        return
    found = profile_digest(profile)
    if plan.profile_digest != found:
        raise PlanError(
            f"{plan_path} was made for another profile (digest {_short(plan.profile_digest)}) than {profile_path} "
            f"({_short(found)}); optimize again, or take its 'profile_digest' out to use it all the same"
        )


def _short(value: str) -> str:
    return value[:19] + "..." if len(value) > 22 else value


def _default_cluster(plan: Plan, profile: Profile, profile_path: Path) -> Cluster:
    if len(profile.devices) > 1:
        raise ProfileError(
            f"{profile_path} covers several device types ({', '.join(profile.devices)}); say which ranks are of which "
            "with --cluster FILE"
        )
    return equal_ranks(plan.num_ranks, profile.devices[0])
