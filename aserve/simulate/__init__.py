"""The real scheduler on a virtual clock: what a policy or a limit does to latency, without a model or a machine.

Pure: no files, no terminal, no wall clock, and chance only from a seed. ``aserve.cli.simulate`` reads and prints.
"""

from aserve.simulate.cost import CostModel, MachineConfig
from aserve.simulate.report import Report
from aserve.simulate.setup import Setup, simulate
from aserve.simulate.trace import TraceConfig, TraceRequest

__all__ = ["CostModel", "MachineConfig", "Report", "Setup", "TraceConfig", "TraceRequest", "simulate"]
