"""The search: partitions, the portfolio of baselines, the tuner and bounds. ``optimize`` is the entry."""

from pipeplan.search.optimize import STRATEGIES, optimize
from pipeplan.search.parallel import optimize_in_parallel
from pipeplan.search.result import SMALL_GAIN, BaselineResult, Progress, SearchResult

__all__ = ["SMALL_GAIN", "STRATEGIES", "BaselineResult", "Progress", "SearchResult", "optimize", "optimize_in_parallel"]
