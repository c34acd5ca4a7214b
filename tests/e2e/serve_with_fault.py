"""``aserve serve`` with an executor that fails at a given step, as a CUDA error would: STEP MODEL FLAGS..."""

from __future__ import annotations

import sys

import aserve.runtime.executor as executor_module
from aserve.cli.main import main
from aserve.core.step import StepResult

fail_at = int(sys.argv.pop(1))
wait = executor_module.LocalExecutor.wait


def failing_wait(self: executor_module.LocalExecutor) -> StepResult:
    result = wait(self)
    if result.step_id == fail_at:
        raise RuntimeError("injected device failure")
    return result


executor_module.LocalExecutor.wait = failing_wait  # type: ignore[method-assign]
sys.argv[1:1] = ["serve"]
sys.exit(main())
