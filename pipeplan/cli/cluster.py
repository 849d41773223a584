"""``pipeplan cluster``: a first cluster file from a hostfile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeplan.cli.options import Json, Quiet

_RANKS = "Ranks"


def cluster(
    hostfile: Annotated[
        Path, typer.Option("--hostfile", metavar="FILE", help="DeepSpeed's hostfile: 'HOST slots=N', one a line.")
    ],
    gpu: Annotated[str, typer.Option("--gpu", help="GPU type of every host, such as h100-sxm.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Cluster file to write.")] = Path(
        "cluster.yaml"
    ),
    network: Annotated[
        str, typer.Option("--network", help="Between nodes: hdr200-ib, ndr400-ib or eth100.")
    ] = "hdr200-ib",
    gpus_per_rank: Annotated[
        int,
        typer.Option("--gpus-per-rank", min=1, help="GPUs of a pipeline rank (estimates).", rich_help_panel=_RANKS),
    ] = 1,
    data_parallel: Annotated[
        int, typer.Option("--data-parallel", min=1, help="Replicas of the pipeline.", rich_help_panel=_RANKS)
    ] = 1,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draft a cluster file from a hostfile, data sheets and rules of thumb; the file says which figure is which.

    Measure the links before a long run, on the hosts themselves. This writes them into a copy of the draft:

    deepspeed --no_local_rank --hostfile FILE --module pipeplan profile --links --cluster cluster.yaml -o measured.yaml

    Example: pipeplan cluster --hostfile hostfile --gpu h100-sxm -o cluster.yaml
    """
    from pipeplan.cli.console import print_json, print_message, print_result
    from pipeplan.cli.render import rich_table
    from pipeplan.cluster import cluster_document
    from pipeplan.emit.tables import Table
    from pipeplan.files import dump_yaml, write_text
    from pipeplan.hostfile import read_hostfile
    from pipeplan.profile.draft import draft_cluster, draft_comment
    from pipeplan.profile.estimate.gpus import find_gpu, read_gpus

    draft = draft_cluster(
        read_hostfile(hostfile),
        find_gpu(gpu, read_gpus()),
        network,
        gpus_per_rank=gpus_per_rank,
        num_replicas=data_parallel,
    )
    document = cluster_document(draft.cluster)
    write_text(output, draft_comment(draft) + dump_yaml(document))
    if json:
        print_json(document)
    else:
        print_result(
            rich_table(
                Table(
                    heading=f"{draft.cluster.num_ranks} ranks on {len(draft.cluster.nodes)} hosts",
                    columns=("figure", "value", "status"),
                    rows=tuple((figure.name, figure.value, figure.status) for figure in draft.figures),
                    footnote="Nothing here was measured; a measured figure always wins.",
                )
            )
        )
    if not quiet:
        print_message(f"wrote {output}")
