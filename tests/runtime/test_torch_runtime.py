"""torch's own runtime executes exported orders, through the real launcher: the verifier against something not ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import launching
import pytest
import torch
import torch_worker
from launching import result_of

from pipeplan.cluster import equal_ranks
from pipeplan.formats.torch_csv import write_torch_csv
from pipeplan.plan.layout import Placement
from pipeplan.plan.ops import Order
from pipeplan.plan.orders import (
    folded_placement,
    interleaved_one_f_one_b,
    looped_placement,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from pipeplan.search.optimize import optimize

pytestmark = pytest.mark.launcher

NUM_RANKS = 4
_OPTIMIZED = optimize(
    launching.profile_of("hybrid"), equal_ranks(NUM_RANKS, launching.DEVICE), num_micro_batches=8, work_limit=200_000
).plan
ORDERS: dict[str, tuple[Placement, Order]] = {
    "1f1b": (looped_placement(4, 1), one_f_one_b(4, 6)),
    "zb-h1": (looped_placement(4, 1), zb_h1(4, 6)),
    "interleaved": (looped_placement(4, 2), interleaved_one_f_one_b(4, 2, 8)),
    "zb-v": (folded_placement(4, 2), zb_v(4, 8)),
    "optimized": (_OPTIMIZED.placement, _OPTIMIZED.order),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export every order and let torch execute them all in one launch."""
    folder = tmp_path_factory.mktemp("torch-runtime")
    cases: list[dict[str, Any]] = []
    for name, (placement, order) in ORDERS.items():
        path = folder / f"{name}.csv"
        path.write_text(write_torch_csv(order))
        cases.append(
            {
                "name": name,
                "csv": str(path),
                "placement": list(placement.rank_by_stage),
                "num_micro_batches": launching.num_micro_batches_of(order),
            }
        )
    launching.launch(NUM_RANKS, cases, folder, script="torch_worker.py")
    return folder


@pytest.mark.parametrize("name", ORDERS)
def test_torch_executes_our_orders(folder: Path, name: str) -> None:
    """The gradients of all ranks are those of one process."""
    placement, order = ORDERS[name]
    expected = torch_worker.gradients_in_one_process(placement.num_stages, launching.num_micro_batches_of(order))
    found: dict[str, torch.Tensor] = {}
    for gradients in result_of(folder, name, NUM_RANKS):
        found |= gradients
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-7)
