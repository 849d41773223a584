"""The exact optimum of small instances, with a proof or an honest "not proved"."""

from pipeplan.search.exact.solve import ExactResult, solve_order

__all__ = ["ExactResult", "solve_order"]
