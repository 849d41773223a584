"""The simulator: the dependency rule, the one clock, memory over time, the timeline and its bubbles, noise."""

from pipeplan.simulate.clock import Clocked, run_clock
from pipeplan.simulate.costs import CostTable, StageCosts
from pipeplan.simulate.dependencies import Result, ResultKind, needs, result_of
from pipeplan.simulate.encoding import EncodedOrder, decode_order, encode_order
from pipeplan.simulate.memory import MemoryPeak, peak_bytes_by_rank, peak_memory
from pipeplan.simulate.noise import NoisyMakespans, noisy_makespans
from pipeplan.simulate.timeline import Bubble, TimedOp, TimedTransfer, Timeline, simulate

__all__ = [
    "Bubble",
    "Clocked",
    "CostTable",
    "EncodedOrder",
    "MemoryPeak",
    "NoisyMakespans",
    "Result",
    "ResultKind",
    "StageCosts",
    "TimedOp",
    "TimedTransfer",
    "Timeline",
    "decode_order",
    "encode_order",
    "needs",
    "noisy_makespans",
    "peak_bytes_by_rank",
    "peak_memory",
    "result_of",
    "run_clock",
    "simulate",
]
