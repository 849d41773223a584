"""The exact optimum of small instances, with a proof or an honest "not proved".

``solve_order`` takes the costs of a fixed layout; ``exact_plan`` a profile and a cluster. Inside: ``instance`` (the job
shop, and why micro-batches may run in their sequence), ``states`` (partial orders and their bounds), ``layers``
(branching, dominance, beam), ``solve`` (the search), ``plan`` (layouts).
"""

from pipeplan.search.exact.plan import MOST_STAGES_PER_RANK, ExactPlan, check_size, exact_plan
from pipeplan.search.exact.solve import ExactResult, solve_order

__all__ = ["MOST_STAGES_PER_RANK", "ExactPlan", "ExactResult", "check_size", "exact_plan", "solve_order"]
