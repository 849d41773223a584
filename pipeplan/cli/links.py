"""``pipeplan profile --links``: what every pair of ranks of a launch takes for a message."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeplan.cluster import Cluster
    from pipeplan.emit.tables import Table
    from pipeplan.profile.links import FittedLink, Pair

_WIDE_ERROR = 0.25


def profile_links(cluster_file: Path | None, output: Path, *, json: bool, quiet: bool) -> None:
    """Measure the links between the processes of a launch and write a cluster file that holds them.

    Runs on every process; rank 0 prints and writes.

    Raises:
        LaunchError: The launcher did not start this process.
    """
    from pipeplan.cli.launched import check_launched

    check_launched("links are measured between", "profile --links -o cluster.yaml")

    from pipeplan.cli.console import print_json, print_message, print_result
    from pipeplan.cli.render import rich_table
    from pipeplan.cluster import cluster_document, write_cluster
    from pipeplan.profile.links import directions_that_differ, fit_links, with_links
    from pipeplan.runtime.links import measure_links

    def show_progress(number: int, num_pairs: int) -> None:
        if not quiet and sys.stderr.isatty():
            print_message(f"measuring pair {number + 1} of {num_pairs}")

    result = measure_links(cluster_file, on_pair=show_progress)
    if result is None:
        return
    cluster, measured = result
    fitted = fit_links(measured)
    measured_cluster = with_links(cluster, {pair: one.link for pair, one in fitted.items()})
    write_cluster(measured_cluster, output)
    if json:
        print_json(cluster_document(measured_cluster))
    else:
        print_result(rich_table(_table(cluster, fitted)))
    if not quiet:
        for (source, target), there, back in directions_that_differ(measured):
            print_message(
                f"warning: ranks {source} and {target}: {there.gb_per_s:g} GB/s one way, {back.gb_per_s:g} GB/s the "
                "other; the cluster file holds what fits both best"
            )
        if any(one.relative_error > _WIDE_ERROR for one in fitted.values()):
            print_message(
                "warning: latency + bytes / bandwidth explains some pairs badly; are the hosts or the network busy? "
                "measure again when they are not"
            )
        print_message(f"wrote {output}")


def _table(cluster: Cluster, fitted: dict[Pair, FittedLink]) -> Table:
    from pipeplan.emit.tables import Table
    from pipeplan.units import us_from_ns

    rows = tuple(
        (
            f"{source} - {target}",
            "within a node" if cluster.ranks[source].node == cluster.ranks[target].node else "between nodes",
            f"{us_from_ns(one.link.latency_ns):,.0f} us",
            f"{one.link.gb_per_s:,.3g} GB/s",
            f"{one.relative_error:.0%}",
        )
        for (source, target), one in fitted.items()
    )
    return Table(
        heading=f"Links of {cluster.num_ranks} ranks",
        columns=("ranks", "", "latency", "bandwidth", "error of the fit"),
        rows=rows,
        footnote="From messages of 1 KB to 64 MB in both directions, one pair at a time.",
    )
