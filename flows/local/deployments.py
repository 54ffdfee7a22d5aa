"""Creates the deployments of prefect.yaml. A schedule that was switched on or off in Prefect stays so, and a deployment
paused there stays paused, although `prefect deploy` makes them anew."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from pydantic import TypeAdapter

from flows.local.server import client_environment
from tasks.prefect_api import api_client
from trinity_core.base.errors import TrinityError
from trinity_core.base.files import read_json, write_json
from trinity_core.base.gate import server_key, state_dir

if TYPE_CHECKING:
    from prefect.client.schemas.objects import DeploymentSchedule

PREFECT_SECONDS = 300.0
SWITCHES = "switches.json"
AT_ONCE = timedelta(seconds=0.1)
"""Prefect dates the creation and the first update of a schedule one after the other."""


def deploy(root: Path, api_url: str, say: Callable[[str], None]) -> None:
    """Create all deployments of prefect.yaml. Raises TrinityError with what Prefect says."""
    env = {**os.environ, **client_environment(api_url, root), "PWD": str(root)}  # prefect.yaml reads PWD
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    with _kept_switches(root, api_url, say):
        try:
            done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=PREFECT_SECONDS)
        except subprocess.TimeoutExpired:
            raise TrinityError(f"`prefect deploy --all` has not ended within {PREFECT_SECONDS:g} s") from None
        if done.returncode:
            raise TrinityError(f"`prefect deploy --all` failed:\n{(done.stderr or done.stdout).strip()[-2000:]}")


@contextmanager
def _kept_switches(root: Path, api_url: str, say: Callable[[str], None]) -> Iterator[None]:
    """Pause deployments that were paused before this context again after it, and switch schedules that were switched in
    Prefect on or off again. Others are as prefect.yaml says. What was before is in a file until then: if the context
    fails or is killed, the next one switches."""
    from prefect.client.schemas.actions import DeploymentUpdate
    from prefect.client.schemas.objects import DeploymentSchedule

    switches, file = TypeAdapter(dict[UUID, tuple[bool, list[DeploymentSchedule]]]), state_dir(root) / SWITCHES
    with api_client(api_url, server_key(root)) as client:
        before = {deployment.id: (deployment.paused, deployment.schedules) for deployment in client.read_deployments()}
    before |= switches.validate_python(read_json(file))
    write_json(file, switches.dump_python(before, mode="json"))
    yield
    with api_client(api_url, server_key(root)) as client:
        for deployment in client.read_deployments():
            if (known := before.get(deployment.id)) is None:
                continue
            was_paused, schedules = known
            title = f"{client.read_flow(deployment.flow_id).name}/{deployment.name}"
            if was_paused and not deployment.paused:
                client.update_deployment(deployment.id, DeploymentUpdate(paused=True))
                say(f"{title} stays paused.")
            for schedule in deployment.schedules:
                earlier = _earlier(schedule, deployment.schedules, schedules)
                if earlier is None or not _was_switched(earlier) or earlier.active == schedule.active:
                    continue
                client.update_deployment_schedule(deployment.id, schedule.id, active=earlier.active)
                switch, other = ("on", "off") if earlier.active else ("off", "on")
                say(f"A schedule of {title} stays {switch}, as it was switched in Prefect; prefect.yaml says {other}.")
    file.unlink()


def _earlier(
    schedule: DeploymentSchedule, now: Sequence[DeploymentSchedule], before: Sequence[DeploymentSchedule]
) -> DeploymentSchedule | None:
    """Return what a deployment's schedule was before: the only one, or the one with the same times."""
    if len(now) == len(before) == 1:
        return before[0]
    return next((earlier for earlier in before if _times(earlier) == _times(schedule)), None)


def _times(schedule: DeploymentSchedule) -> object:
    return type(schedule.schedule), schedule.schedule.model_dump(exclude={"anchor_date"})  # by default its creation


def _was_switched(schedule: DeploymentSchedule) -> bool:
    return bool(schedule.created and schedule.updated and schedule.updated - schedule.created > AT_ONCE)
