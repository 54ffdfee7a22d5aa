"""The page and the JSON behind it. Only GET, only reading; text of a model leaves here as JSON and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import Field

from trinity_core.data.experience import Experience
from trinity_core.errors import TransientFault, TrinityError
from trinity_core.store.schema import State
from trinity_core.view.archived import archived_rollouts
from trinity_core.view.groups import GroupFilter, find_groups, group_row, overview
from trinity_core.view.samples import read_samples, sample_steps, side_by_side
from trinity_core.view.shared_page import shared_page
from trinity_core.view.tokens import PAGE, mean_advantage, token_page
from trinity_core.view.viewed_run import ViewedRun

STATIC = Path(__file__).parent / "static"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
"""What a browser lets the page do: nothing from elsewhere, no code within its HTML."""
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
"""Groups of one page of the table."""
LARGEST = 2**63 - 1
"""The largest number that a database holds."""
Id = Annotated[int, Field(ge=0, le=LARGEST)]
Number = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]


def make_app(runs: Mapping[str, ViewedRun], hosts: list[str]) -> FastAPI:
    """The application, of runs by name; a run is looked up when its page is asked for.

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
        shown: dict[str, Any] = {"folder": str(run.folder), "samples": sample_steps(run.folder), "store": None}
        if run.has_store:
            with run.read() as (connection, t):
                shown["store"] = overview(connection, t)
        return shown

    _add_groups(app, run_named)
    _add_rollouts(app, run_named)

    @app.get("/api/runs/{name:path}/samples/{source}/{step}")
    def samples(name: str, source: str, step: int, beside: int | None = None, other: str = "") -> dict[str, Any]:
        """Those of a step, next to those of step `beside` of the run `other` (default: this run) if that is given."""
        left = read_samples(run_named(name).folder, source, step)
        right = [] if beside is None else read_samples(run_named(other or name).folder, source, beside)
        return {"pairs": side_by_side(left, right)}


def _add_groups(app: FastAPI, run_named: Callable[[str], ViewedRun]) -> None:
    @app.get("/api/runs/{name:path}/groups")
    def groups(
        name: str, step: Number | None = None, version: Number | None = None, taskset: str = "", group: str = "",
        state: str = "", reward_min: float | None = None, reward_max: float | None = None, before: Id | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 30,
    ) -> dict[str, Any]:  # fmt: skip
        if state and state.upper() not in State.__members__:
            raise HTTPException(404, f"there is no state {state}")
        wanted = GroupFilter(step, version, taskset, group, state, reward_min, reward_max)
        with run_named(name).read() as (connection, t):
            found = find_groups(connection, t, wanted, before, limit)
        return {"groups": found.groups, "before": found.before}

    @app.get("/api/runs/{name:path}/groups/{group_id:int}")
    def one_group(name: str, group_id: Id) -> dict[str, Any]:
        run = run_named(name)
        with run.read() as (connection, t):
            row = group_row(connection, t, group_id)
        if row is None:
            raise HTTPException(404, f"there is no group {group_id}")
        if not row["stored"]:
            lines = [
                line
                for step in row["train_steps"][:1]
                for line in archived_rollouts(run.layout.archive, step, row["group"], group_id)
            ]
            return row | {"rollouts": list(map(_archived, lines)), "note": ""}
        shown, experiences = run.advantages(group_id), run.experiences(group_id)
        values: Sequence[np.ndarray] | repeat[None] = shown.values or repeat(None)
        return row | {"rollouts": list(map(_rollout, experiences, values)), "note": shown.note}


def _add_rollouts(app: FastAPI, run_named: Callable[[str], ViewedRun]) -> None:
    @app.get("/api/runs/{name:path}/rollouts")
    def rollouts(name: str, step: Number | None = None, group: str = "", before: Id | None = None) -> dict[str, Any]:
        """The rollouts of a page of groups, newest first, each as a row of a table."""
        run, rows = run_named(name), list[dict[str, Any]]()
        with run.read() as (connection, t):
            found = find_groups(connection, t, GroupFilter(step, group=group), before, TABLE_GROUPS)
        for entry in found.groups:
            values: Sequence[np.ndarray] | repeat[None] = run.advantages(entry["id"]).values or repeat(None)
            of_group = {name: entry[name] for name in ("id", "step", "task", "newest")}
            for place, (one, own) in enumerate(zip(run.experiences(entry["id"]), values, strict=False)):
                rows.append(of_group | {"place": place} | _rollout(one, own))
        return {"rollouts": rows, "before": found.before}

    @app.get("/api/runs/{name:path}/groups/{group_id:int}/page.html")
    def page_to_send(name: str, group_id: Id) -> Response:
        """One file with the group's rollouts, to be saved."""
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


def _rollout(experience: Experience, advantages: np.ndarray | None) -> dict[str, Any]:
    """An experience without its tokens, with the mean of its advantages. Long texts are cut."""
    sampled = [] if experience.versions is None else [each for each in experience.versions.tolist() if each >= 0]
    known = ("prompt", "response", "truth")
    return {
        "run": experience.run, "turn": experience.turn, "reward": experience.reward, "metrics": experience.metrics,
        "prompt_length": experience.prompt_length, "response_length": experience.response_length,
        "actions": int(experience.action_mask.sum()), "truncated": experience.truncated,
        "is_expert": experience.is_expert, "task_index": experience.task_index,
        "oldest": min(sampled, default=-1), "newest": max(sampled, default=-1),
        "advantage": mean_advantage(experience, advantages),
        **{name: _cut(experience.info.get(name, "")) for name in known},
        "info": {name: _cut(value) for name, value in experience.info.items() if name not in known},
    }  # fmt: skip


def _archived(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the archive as `_rollout` gives an experience: texts without tokens."""
    texts = {name: _cut(line.get(name, "")) for name in ("prompt", "response", "truth")}
    fields = ("run", "turn", "reward", "metrics", "truncated", "is_expert", "task_index")
    lengths = {"prompt_length": line["prompt_tokens"], "response_length": line["response_tokens"], "actions": None}
    version = {"oldest": line["policy_version"], "newest": line["policy_version"], "advantage": None}
    return {name: line[name] for name in fields} | lengths | version | texts | {"info": {}, "archived": True}


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    return (
        text if len(text) <= TEXT else f"{text[: TEXT // 2]}\n… {len(text) - TEXT} characters …\n{text[-TEXT // 2 :]}"
    )
