"""The page and its JSON API. Only GET, read-only; a model's text leaves only as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import Field

from trinity_core.data.experience import Experience, rollout_rewards, rollouts_of
from trinity_core.errors import TransientFault, TrinityError
from trinity_core.store.schema import State
from trinity_core.view.archived import archived_rollouts
from trinity_core.view.groups import GroupFilter, earlier_draws, find_groups, group_row
from trinity_core.view.samples import read_samples, sample_steps, side_by_side
from trinity_core.view.shared_page import shared_page
from trinity_core.view.tokens import PAGE, mean_advantage, token_page
from trinity_core.view.viewed_run import ViewedRun

STATIC = Path(__file__).parent / "static"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
"""Content security policy: nothing from other origins, no inline code."""
HEADERS = {
    # Studio, which serves this page under its own address, shows it in a frame.
    "Content-Security-Policy": f"{POLICY}; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
TEXT = 20_000
"""Characters of a prompt or an answer in a group; the rest is read token by token."""

TABLE_GROUPS = 25
ROUNDING = 1e-9
"""Mean rewards that differ by less count as equal."""
LARGEST = 2**63 - 1
Id = Annotated[int, Field(ge=0, le=LARGEST)]
Number = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]


def make_app(runs: Mapping[str, ViewedRun], hosts: list[str]) -> FastAPI:
    """Return the application for runs by name; a run is looked up when its page is requested.

    It answers requests for these hosts only, so that no other site's page can read through it.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    app.mount("/static", StaticFiles(directory=STATIC))

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(TrinityError)
    async def refused(request: Request, error: TrinityError) -> Response:
        return JSONResponse({"detail": str(error)}, 404)

    @app.exception_handler(TransientFault)
    async def away(request: Request, error: TransientFault) -> Response:
        return JSONResponse({"detail": str(error)}, 503)

    @app.get("/")
    def page() -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8")

    _add_data(app, runs)
    return app


def _add_data(app: FastAPI, runs: Mapping[str, ViewedRun]) -> None:
    def run_named(name: str) -> ViewedRun:
        try:
            return runs[name]
        except KeyError:
            raise HTTPException(404, f"there is no run {name}") from None

    @app.get("/api/runs")
    def names() -> list[str]:
        return list(runs)

    @app.get("/api/runs/{name:path}/about")
    def about(name: str) -> dict[str, Any]:
        run = run_named(name)
        return {"folder": str(run.folder), "samples": sample_steps(run.folder), "has_store": run.has_store}

    _add_groups(app, run_named)
    _add_rollouts(app, run_named)

    @app.get("/api/runs/{name:path}/samples/{source}/{step}")
    def samples(name: str, source: str, step: int, beside: int | None = None, other: str = "") -> dict[str, Any]:
        """Return samples of a step, paired with those of step `beside` of the run `other` (default: this run) if
        given."""
        left = read_samples(run_named(name).folder, source, step)
        right = [] if beside is None else read_samples(run_named(other or name).folder, source, beside)
        return {"pairs": side_by_side(left, right)}


def _add_groups(app: FastAPI, run_named: Callable[[str], ViewedRun]) -> None:
    @app.get("/api/runs/{name:path}/rollouts")
    def rollouts(
        name: str, step: Number | None = None, version: Number | None = None, group: str = "", state: str = "",
        since: Number | None = None, before: Id | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the rollouts of a page of groups, newest first, one table row each; one row for a group without
        rollouts.

        With `since`, only the latest groups of tasks whose mean reward changed since that explore step.
        """
        if state and state.upper() not in State.__members__:
            raise HTTPException(404, f"there is no state {state}")
        run = run_named(name)
        with run.read() as (connection, t):
            page = find_groups(connection, t, GroupFilter(step, version, group, state, since), before, TABLE_GROUPS)
            earlier = {} if since is None else earlier_draws(connection, t, page.groups, since)
        listed = [_rows(run, entry) for entry in page.groups]
        if since is not None:
            listed = [rows for rows in listed if _differ(_mean(rows), _mean(_rows(run, earlier[rows[0]["task"]])))]
        return {"rollouts": [row for rows in listed for row in rows], "before": page.before}

    @app.get("/api/runs/{name:path}/groups/{group_id:int}")
    def one_group(name: str, group_id: Id) -> dict[str, Any]:
        run = run_named(name)
        with run.read() as (connection, t):
            row = group_row(connection, t, group_id)
        if row is None:
            raise HTTPException(404, f"there is no group {group_id}")
        return row | {"rollouts": _rollouts(run, row), "note": run.advantages(group_id).note}


def _add_rollouts(app: FastAPI, run_named: Callable[[str], ViewedRun]) -> None:
    @app.get("/api/runs/{name:path}/groups/{group_id:int}/page.html")
    def page_to_send(name: str, group_id: Id) -> Response:
        """Return a group's rollouts as a single file to save."""
        run = run_named(name)
        with run.read() as (connection, t):
            row = group_row(connection, t, group_id)
        experiences = run.experiences(group_id)
        if row is None or not experiences:
            raise HTTPException(404, f"the rollouts of group {group_id} are not in the store")
        text = shared_page(name, row, experiences, run.advantages(group_id).values, run.tokenizer)
        file = f'attachment; filename="rollouts_{group_id}.html"'
        return HTMLResponse(text, headers={"Content-Disposition": file})

    @app.get("/api/runs/{name:path}/groups/{group_id:int}/rollouts/{place}/tokens")
    def tokens(
        name: str, group_id: Id, place: Id, offset: Id = 0, limit: Annotated[int, Query(ge=1, le=PAGE)] = PAGE
    ) -> dict[str, Any]:
        run = run_named(name)
        experiences = run.experiences(group_id)
        if place >= len(experiences):
            raise HTTPException(404, f"group {group_id} has no stored rollout {place}")
        values = run.advantages(group_id).values
        return token_page(experiences[place], run.tokenizer, values[place] if values else None, offset, limit)


def _rollouts(run: ViewedRun, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a group's rollouts from the store or, without tokens, from the archive; empty for a failed task."""
    if not row["stored"]:
        steps, path = row["train_steps"][:1], run.layout.archive
        return [_archived(line) for step in steps for line in archived_rollouts(path, step, row["group"], row["id"])]
    values: Sequence[np.ndarray] | repeat[None] = run.advantages(row["id"]).values or repeat(None)
    return [_rollout(*pair) for pair in zip(run.experiences(row["id"]), values, strict=False)]


def _rows(run: ViewedRun, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a group's rollouts for the table; without rollouts, one row with the task's outcome."""
    group = {name: entry[name] for name in ("id", "step", "task", "state")}
    none: dict[str, Any] = {"prompt": "", "response": entry["failure"] or "", "truth": "", "metrics": {}}
    rollouts = _rollouts(run, entry) or [none | dict.fromkeys(("reward", "advantage", "response_length"))]
    return [group | {"place": place} | rollout for place, rollout in enumerate(rollouts)]


def _mean(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean reward of a group's rollouts, each counted once whatever its number of turns; None without
    any."""
    turns: list[Any] = [
        SimpleNamespace(group=row["id"], run=row["run"], turn=row["turn"], total_reward=row["reward"])
        for row in rows
        if "run" in row
    ]
    by_rollout = dict(zip(rollouts_of(turns), rollout_rewards(turns), strict=True))
    rewards = [reward for reward in by_rollout.values() if reward is not None]
    return math.fsum(rewards) / len(rewards) if rewards else None


def _differ(one: float | None, other: float | None) -> bool:
    """True for two numbers that differ by more than rounding."""
    return one is not None and other is not None and not math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING)


def _rollout(experience: Experience, advantages: np.ndarray | None) -> dict[str, Any]:
    """Return an experience without tokens, with its mean advantage. Long texts are cut."""
    sampled = [] if experience.versions is None else [one for one in experience.versions.tolist() if one >= 0]
    known = ("prompt", "response", "truth")
    return {
        "run": experience.run, "turn": experience.turn, "reward": experience.total_reward,
        "metrics": experience.metrics, "truncated": experience.truncated,
        "prompt_length": experience.prompt_length, "response_length": experience.response_length,
        "actions": int(experience.action_mask.sum()), "is_expert": experience.is_expert,
        "oldest": min(sampled, default=-1), "newest": max(sampled, default=-1),
        "advantage": mean_advantage(experience, advantages),
        **{name: _cut(experience.info.get(name, "")) for name in known},
        "info": {_cut(name): _cut(value) for name, value in experience.info.items() if name not in known},
    }  # fmt: skip


def _archived(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the archive in the format of `_rollout`."""
    texts = {name: _cut(line.get(name, "")) for name in ("prompt", "response", "truth")}
    fields = ("run", "turn", "reward", "metrics", "truncated", "is_expert")
    lengths = {"prompt_length": line["prompt_tokens"], "response_length": line["response_tokens"], "actions": None}
    version = {"oldest": line["policy_version"], "newest": line["policy_version"], "advantage": None}
    return {name: line[name] for name in fields} | lengths | version | texts | {"info": {}, "archived": True}


def _cut(value: Any) -> str:
    """Return a text fit for sending: limited in length, without unpaired surrogates."""
    text = str(value).encode(errors="replace").decode()
    return (
        text if len(text) <= TEXT else f"{text[: TEXT // 2]}\n… {len(text) - TEXT} characters …\n{text[-TEXT // 2 :]}"
    )
