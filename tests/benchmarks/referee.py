"""An independent referee for small instances: the same problem, written down again for OR-tools' CP-SAT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeplan.simulate.costs import StageCosts


def solve_with_cp_sat(
    costs: StageCosts,
    num_micro_batches: int,
    usable_bytes_by_rank: Sequence[int | None],
    can_split_by_stage: Sequence[bool],
    *,
    time_limit_s: float,
    in_micro_batch_order: bool = False,
) -> tuple[int | None, int]:
    """Return (best makespan found, lower bound) in nanoseconds; boundaries in flight count no memory.

    Args:
        in_micro_batch_order: Impose what pipeplan's own solver argues is no loss; without it, the argument is tested.
    """
    from ortools.sat.python import cp_model  # optional: only this benchmark uses it

    model = cp_model.CpModel()
    duration = costs.duration_ns.tolist()
    ranks = costs.rank_by_stage.tolist()
    num_stages = len(ranks)
    horizon = 2 * int(costs.duration_ns.sum()) * num_micro_batches + num_micro_batches * num_stages * (
        int(costs.forward_transfer_ns.max()) + int(costs.backward_transfer_ns.max()) + costs.send_ns + costs.wait_ns
    )
    on_rank: dict[int, list[Any]] = {rank: [] for rank in range(costs.num_ranks)}
    kept: dict[int, list[tuple[Any, int]]] = {rank: [] for rank in range(costs.num_ranks)}
    queues: dict[tuple[int, int], list[tuple[Any, Any, Any]]] = {}
    makespan = model.new_int_var(0, horizon, "makespan")

    def time(name: str) -> Any:
        return model.new_int_var(0, horizon, name)

    start: dict[tuple[str, int, int], Any] = {}
    end: dict[tuple[str, int, int], Any] = {}
    arrival: dict[tuple[str, int, int], Any] = {}
    splits: dict[tuple[int, int], Any] = {}
    for s in range(num_stages):
        for k in range(num_micro_batches):
            splits[s, k] = model.new_bool_var(f"split{s},{k}") if can_split_by_stage[s] else model.new_constant(0)
    for direction, step in (("F", 1), ("B", -1)):
        for s in range(num_stages):
            source_rank = ranks[s - step] if 0 <= s - step < num_stages else ranks[s]
            target_rank = ranks[s + step] if 0 <= s + step < num_stages else ranks[s]
            wait_ns = costs.wait_ns if source_rank != ranks[s] else 0
            send_ns = costs.send_ns if target_rank != ranks[s] else 0
            for k in range(num_micro_batches):
                key = (direction, s, k)
                start[key], end[key] = time(f"s{key}"), time(f"e{key}")
                busy_ns: Any = duration[s][0]
                if direction == "B":
                    busy_ns = duration[s][1] + (duration[s][2] - duration[s][1]) * splits[s, k]
                model.add(end[key] == start[key] + wait_ns + busy_ns)
                released = time(f"r{key}")
                model.add(released == end[key] + send_ns)
                on_rank[ranks[s]].append(
                    model.new_interval_var(start[key], wait_ns + busy_ns + send_ns, released, f"i{key}")
                )
                model.add(makespan >= end[key])
                if target_rank != ranks[s]:
                    transfer_ns = int((costs.forward_transfer_ns if step == 1 else costs.backward_transfer_ns)[s])
                    begins, arrival[key] = time(f"m{key}"), time(f"a{key}")
                    model.add(begins >= end[key])
                    model.add(arrival[key] == begins + transfer_ns)
                    queues.setdefault((ranks[s], target_rank), []).append((end[key], begins, arrival[key]))
                else:
                    arrival[key] = end[key]
    for s in range(num_stages):
        for k in range(num_micro_batches):
            if s > 0:
                model.add(start["F", s, k] >= arrival["F", s - 1, k])
            if s < num_stages - 1:
                model.add(start["B", s, k] >= arrival["B", s + 1, k])
            model.add(start["B", s, k] >= end["F", s, k])
            if in_micro_batch_order and k > 0:
                model.add(start["F", s, k] >= end["F", s, k - 1])
                model.add(start["B", s, k] >= end["B", s, k - 1])
            length = time(f"kept{s},{k}")
            kept[ranks[s]].append(
                (
                    model.new_interval_var(start["F", s, k], length, end["B", s, k], f"act{s},{k}"),
                    int(costs.activation_bytes[s]),
                )
            )
            if can_split_by_stage[s]:
                w_start, w_end, held_length = time(f"ws{s},{k}"), time(f"we{s},{k}"), time(f"hl{s},{k}")
                on_rank[ranks[s]].append(
                    model.new_optional_interval_var(w_start, duration[s][3], w_end, splits[s, k], f"w{s},{k}")
                )
                model.add(w_start >= end["B", s, k]).only_enforce_if(splits[s, k])
                model.add(makespan >= w_end).only_enforce_if(splits[s, k])
                kept[ranks[s]].append(
                    (
                        model.new_optional_interval_var(
                            end["B", s, k], held_length, w_end, splits[s, k], f"held{s},{k}"
                        ),
                        int(costs.held_bytes[s]),
                    )
                )
    for rank, intervals in on_rank.items():
        model.add_no_overlap(intervals)
        cap = usable_bytes_by_rank[rank]
        if cap is not None:
            model.add_cumulative(
                [interval for interval, _ in kept[rank]],
                [size for _, size in kept[rank]],
                cap - int(costs.state_bytes[rank]),
            )
    for messages in queues.values():  # the queue's order is the producer's
        for index, (end_a, begins_a, arrival_a) in enumerate(messages):
            for end_b, begins_b, arrival_b in messages[:index]:
                a_first = model.new_bool_var("")
                model.add(end_a <= end_b).only_enforce_if(a_first)
                model.add(arrival_a <= begins_b).only_enforce_if(a_first)
                model.add(end_b <= end_a).only_enforce_if(~a_first)
                model.add(arrival_b <= begins_a).only_enforce_if(~a_first)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    found = int(solver.objective_value) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    return found, int(solver.best_objective_bound)
