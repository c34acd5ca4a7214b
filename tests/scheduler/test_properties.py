"""Whatever is added, cancelled, shared, chunked, preempted, overlapped, offloaded or reset, S1 to S12 hold.

Four machines of 500 histories: of plain models and of those with windows, each with and without host memory.
"""

from __future__ import annotations

import pytest
from history import FULL, WINDOWED, History
from hypothesis import Phase, settings

pytestmark = pytest.mark.timeout(900)  # 15 to 20 s of CPU each, on a machine that may do much else
# no explain phase: it takes longer than a test may, and the history that fails is short already
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
SETTINGS = settings(max_examples=500, stateful_step_count=30, deadline=None, phases=PHASES)


class Full(History):
    windows = FULL
    num_host_blocks = (0,)


class FullOffload(History):
    windows = FULL
    num_host_blocks = (1, 2, 5, 30)


class Windowed(History):
    windows = WINDOWED
    num_host_blocks = (0,)


class WindowedOffload(History):
    windows = WINDOWED
    num_host_blocks = (1, 3, 8, 30)


TestFull = Full.TestCase
TestFullOffload = FullOffload.TestCase
TestWindowed = Windowed.TestCase
TestWindowedOffload = WindowedOffload.TestCase
TestFull.settings = TestFullOffload.settings = TestWindowed.settings = TestWindowedOffload.settings = SETTINGS
