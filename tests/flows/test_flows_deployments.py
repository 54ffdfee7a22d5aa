"""Deployments of a prefect.yaml that is deployed again: what it says now, and what was switched in Prefect."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate

from flows.local import deployments
from flows.local.deployments import deploy
from trinity_core.base.gate import key_file, make_state_dir

pytestmark = pytest.mark.slow

FLOW = """
from prefect import flow

@flow(name="of-test-deployments")
def main(): ...
"""
DEPLOYMENT = """
  - name: {name}
    entrypoint: main.py:main
    work_pool: {{name: of-test-deployments}}
    parameters: {{}}
    schedules:
"""


def settings(**schedules: list[str]) -> str:
    """A prefect.yaml: deployment → its schedules, in YAML."""
    texts = [
        DEPLOYMENT.format(name=name) + "".join(f"      - {{{one}}}\n" for one in each)
        for name, each in schedules.items()
    ]
    return "name: tests\ndeployments:" + "".join(texts)


def schedules_of(name: str) -> dict[str, bool]:
    """Cron or interval in seconds → whether it is on."""
    with get_client(sync_client=True) as client:
        schedules = client.read_deployment_by_name(f"of-test-deployments/{name}").schedules
    times = [one.schedule.model_dump() for one in schedules]
    shown = [each.get("cron") or str(each["interval"].seconds) for each in times]
    return dict(zip(shown, [one.active for one in schedules], strict=True))


def switch(name: str, active: bool) -> None:
    """Every schedule of a deployment, as a person does."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(f"of-test-deployments/{name}")
        for schedule in deployment.schedules:
            client.update_deployment_schedule(deployment.id, schedule.id, active=active)


def killed_after(run: Callable[..., Any]) -> Callable[..., Any]:
    def killed(*arguments: Any, **options: Any) -> None:
        run(*arguments, **options)
        raise KeyboardInterrupt

    return killed


def test_what_a_person_has_switched_or_paused_stays_so(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two times, also after a deployment that was killed; others follow prefect.yaml, whose other changes arrive."""
    make_state_dir(tmp_path)
    key_file(tmp_path).write_text(os.environ["PREFECT_API_AUTH_STRING"])
    (tmp_path / "main.py").write_text(FLOW)
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="of-test-deployments", type="process"), overwrite=True)
    said = list[str]()
    first = settings(
        one=['cron: "0 * * * *", active: false'],
        many=["interval: 600, active: true", "interval: 900, active: true"],
        untouched=['cron: "0 1 * * *", active: false'],
    )
    (tmp_path / "prefect.yaml").write_text(first)
    deploy(tmp_path, prefect_api, said.append)
    assert schedules_of("one") == {"0 * * * *": False} and not said
    switch("one", active=True)
    switch("many", active=False)
    with get_client(sync_client=True) as client:
        paused = client.read_deployment_by_name("of-test-deployments/many")
        client.update_deployment(paused.id, DeploymentUpdate(paused=True))
    changed = first.replace('"0 * * * *"', '"5 * * * *"').replace('1 * * *", active: false', '2 * * *", active: true')
    (tmp_path / "prefect.yaml").write_text(changed)
    with monkeypatch.context() as patched:
        patched.setattr(deployments.subprocess, "run", killed_after(subprocess.run))
        with pytest.raises(KeyboardInterrupt):
            deploy(tmp_path, prefect_api, said.append)
    assert schedules_of("many") == {"600": True, "900": True}
    for _ in range(2):
        deploy(tmp_path, prefect_api, said.append)
        assert schedules_of("one") == {"5 * * * *": True}
        assert schedules_of("many") == {"600": False, "900": False}
        assert schedules_of("untouched") == {"0 2 * * *": True}
        with get_client(sync_client=True) as client:
            assert client.read_deployment(paused.id).paused
    assert len(said) == 8 and len({*said}) == 3
