"""The page of a real run, in a real browser."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest
from browser import opened
from chaos.pipeline import STEPS, Undisturbed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_run_is_shown(undisturbed: Undisturbed, serving, tmp_path) -> None:
    """Its tokens are its texts, its advantages those of its algorithm; its checkpoints can be chosen."""
    job = undisturbed.run.job

    async def look(address: str) -> None:
        async with opened(f"{address}/#run={job.name}&group=1", tmp_path) as page:
            await page.until("document.querySelectorAll('.t.a').length > 0")
        source = httpx.get(f"{address}/api/runs/{job.name}/about").json()["sources"][0]
        async with opened(f"{address}/#run={job.name}&source={source}&step={STEPS}", tmp_path) as page:
            await page.until("document.querySelectorAll('#table tbody tr').length > 0")
            assert await page.value("document.forms.rows.source.value") == source
            assert await page.value("document.forms.rows.step.value") == str(STEPS)

    with serving(job) as address, httpx.Client(base_url=f"{address}/api") as client:
        assert job.name in client.get("/runs").json()
        group = client.get(f"/runs/{job.name}/groups/1").json()
        for number, rollout in enumerate(group["rollouts"]):
            tokens = client.get(f"/runs/{job.name}/groups/1/rollouts/{number}/tokens").json()
            answer = "".join(tokens["text"][tokens["prompt_length"] :]).removesuffix("<|im_end|>")
            assert answer == rollout["response"] or "\ufffd" in answer, "but for bytes that are no text"
        rewards = np.array([rollout["reward"] for rollout in group["rollouts"]])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        assert np.allclose([rollout["advantage"] for rollout in group["rollouts"]], advantages, atol=1e-4)
        asyncio.run(look(address))
