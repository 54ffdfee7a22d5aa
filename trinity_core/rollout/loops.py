"""The explorer's loop, twice: in step with the trainer, and on its own. The verbs are `Explorer`'s."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_core.sync.schedule import dynamic_version, required_version

if TYPE_CHECKING:
    from trinity_core.rollout.explorer import Explorer


async def explore_in_step(explorer: Explorer) -> None:
    """`sync_style: fixed`: each step waits for the version that is due, and uses that one."""
    sync = explorer.config.synchronizer
    for step in explorer.steps():
        version = await explorer.wait_for(required_version(step, sync.sync_interval, sync.sync_offset))
        if version is None:
            return
        await explorer.take(version)
        await explorer.evaluate_if_due()
        batch = await explorer.explore(step)
        await explorer.keep(batch, waits_for=required_version(step + 1, sync.sync_interval, sync.sync_offset))


async def explore_freely(explorer: Explorer) -> None:
    """`sync_style: dynamic_…`, or an explorer without a trainer beside it: the newest version there is."""
    sync = explorer.config.synchronizer
    for step in explorer.steps():
        version = dynamic_version(step, sync.sync_interval, explorer.version, explorer.weights.latest())
        if version is None:
            version = await explorer.wait_for(0)
        if version is None:
            return
        await explorer.take(version)
        await explorer.evaluate_if_due()
        await explorer.keep(await explorer.explore(step))
