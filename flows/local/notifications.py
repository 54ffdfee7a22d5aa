"""The notifications of `trinity up`: an automation of Prefect that tells a webhook how a deployment's run ended.

`notify` in prefect.yaml has the webhook's `url`, and optionally `when`, some of `finished`, `failed` and `findings`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tasks.prefect_api import NOT_PROMOTED, WITH_FINDINGS, api_client
from trinity_core.base.errors import TrinityError
from trinity_core.base.gate import server_key

NAME = "trinity-notify"
"""Of the automation, and of the block with the address."""
STATES = {
    "finished": ("Completed", NOT_PROMOTED),
    "failed": ("Failed", "Crashed", "TimedOut"),
    "findings": (WITH_FINDINGS,),
}
"""Value of `when` → names of Prefect's states."""
VARIABLE = re.compile(r"\{\{\s*\$(\w+)\s*\}\}")
"""An environment variable, as in the rest of prefect.yaml."""
SUBJECT = "{{ flow_run.name }}: {{ flow_run.state.name }}"
BODY = "{{ flow_run.state.message or '' }} {{ flow_run|ui_url }}"


def set_notifications(root: Path, api_url: str) -> str:
    """Create, change or remove the automation as prefect.yaml says. Return what was set, for people; "" if nothing is.

    Raises TrinityError for settings that cannot be used.
    """
    from prefect.automations import AutomationCore
    from prefect.blocks.notifications import CustomWebhookNotificationBlock
    from prefect.events.actions import SendNotification
    from prefect.events.schemas.automations import EventTrigger, Posture

    settings = _settings(root)
    with api_client(api_url, server_key(root)) as client:
        present = client.read_automations_by_name(NAME)
        if not settings:
            for automation in present:
                client.delete_automation(automation.id)
            return ""
        message = {"text": "{{subject}}\n{{body}}", "content": "{{subject}}\n{{body}}"}  # Slack's key, Discord's
        values = {"name": NAME, "url": settings["url"], "json_data": message}
        block_id: Any = CustomWebhookNotificationBlock.model_validate(values).save(NAME, overwrite=True)
        states = [state for kind in settings["when"] for state in STATES[kind]]
        trigger = EventTrigger(
            expect={f"prefect.flow-run.{state}" for state in states},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={"prefect.resource.id": "prefect.deployment.*"},  # a pipeline's stages have none
            posture=Posture.Reactive,
        )
        action = SendNotification(block_document_id=block_id, subject=SUBJECT, body=BODY)
        notifying = AutomationCore(name=NAME, trigger=trigger, actions=[action])
        if present:
            client.update_automation(present[0].id, notifying)
        else:
            client.create_automation(notifying)
    return ", ".join(settings["when"])


def _settings(root: Path) -> dict[str, Any]:
    """Return `url` and `when`; empty if nothing is to be notified."""
    text = (root / "prefect.yaml").read_text(encoding="utf-8")
    settings = (yaml.safe_load(text) or {}).get("notify")
    if settings is None:
        return {}
    if not isinstance(settings, Mapping) or not isinstance(settings.get("url"), str) or {*settings} - {"url", "when"}:
        raise TrinityError("notify in prefect.yaml takes `url`, a webhook's address, and `when`.", key="notify")
    missing = [name for name in VARIABLE.findall(settings["url"]) if not os.environ.get(name)]
    if missing:
        raise TrinityError(f"notify.url in prefect.yaml needs {missing[0]}, which is not set.", key="notify.url")
    url = VARIABLE.sub(lambda match: os.environ[match[1]], settings["url"])
    if not url.startswith(("http://", "https://")):
        raise TrinityError("notify.url in prefect.yaml is no address of a webhook (https://…).", key="notify.url")
    kinds = settings.get("when", list(STATES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not kinds or [kind for kind in kinds if kind not in STATES]:
        raise TrinityError(f"notify.when in prefect.yaml is a list of {', '.join(STATES)}.", key="notify.when")
    return {"url": url, "when": kinds}
