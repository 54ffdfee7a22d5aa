"""The experience operators of a step, beside the explorer's loop."""

from __future__ import annotations

import asyncio

from trinity_core.data.experience import Experience
from trinity_core.errors import TrinityError
from trinity_core.pipelines.operators import OperatorPipeline
from trinity_core.threads import DaemonThreads

OPERATOR_SECONDS = 3600.0
"""For the operators of a step. A model as a judge may be among them."""


async def operated(
    operators: OperatorPipeline, experiences: list[Experience]
) -> tuple[list[Experience], dict[str, dict[str, int]]]:
    """What the operators leave, and what they dropped. They run in a thread, since plugins may take their time."""
    work = asyncio.get_running_loop().run_in_executor(DaemonThreads("operators"), operators.run, experiences)
    try:
        return await asyncio.wait_for(work, OPERATOR_SECONDS)
    except TimeoutError:
        names = ", ".join(name for name, _ in operators.operators)
        raise TrinityError(f"the experience operators ({names}) took longer than {OPERATOR_SECONDS:g} s") from None
