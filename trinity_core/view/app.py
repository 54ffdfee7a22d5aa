"""The page and its JSON API. Only GET, read-only; a model's text leaves only as JSON.

Groups come from the store, newest first; experiences that have left it from `buffer/experience_buffer.jsonl`. Samples
of evaluations and some explore steps, which have texts but no tokens, come from files; those of one task are a group.
"""

from __future__ import annotations

import json
import socket
import threading
import webbrowser
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain, repeat
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import Field
from sqlalchemy import Connection, Row, Select, select

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.gate import Gate, asked_for, server_key
from trinity_core.data.experience import Experience
from trinity_core.exchange.store.archive import Advantage, Line
from trinity_core.exchange.store.schema import State, Tables
from trinity_core.exchange.tracking.rollouts import read_rollouts, rollout_files
from trinity_core.view.tokens import PAGE, token_page
from trinity_core.view.viewed_run import ViewedRun, import_for_pages

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
Json = dict[str, Any]
TEXT = 20_000
"""Characters of a prompt or an answer in a group; the rest is read token by token."""

MOST_WORDS = 300
TABLE_GROUPS = 25
LARGEST = 2**63 - 1
Id = Annotated[int, Field(ge=0, le=LARGEST)]
Number = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]


def serve(
    runs: Mapping[str, ViewedRun], host: str, port: int, open_browser: bool, say: Callable[[str], object]
) -> None:
    """Serve until SIGINT or SIGTERM, to those who have this folder's key. Raises TrinityError if the port is taken."""
    from uvicorn import Config, Server

    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise TrinityError(
            f"the page cannot be served on {host}:{port}: {error}; give another --port or --host"
        ) from error
    shown_host = f"[{host}]" if ":" in host else host
    url = f"http://{shown_host}:{listening.getsockname()[1]}"
    key = server_key()
    say(f"{url}   ({asked_for(key)}; Ctrl+C ends it)")
    app = Gate(make_app(runs), key, host)
    server = Server(Config(app, log_config=None, access_log=False, lifespan="off"))
    threading.Thread(target=import_for_pages, daemon=True).start()
    if open_browser:  # it may connect already, and is answered once the server runs
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    server.run(sockets=[listening])


def make_app(runs: Mapping[str, ViewedRun]) -> FastAPI:
    """Return the application for runs by name, to be served behind a `Gate`; a run is looked up when its page is
    requested."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
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
        sampled = {source for source, _, _ in rollout_files(run.folder)}
        sources = sorted(sampled, key=lambda source: (not source.startswith("eval"), source))
        return {"folder": str(run.folder), "sources": sources, "has_store": run.has_store}

    _add_groups(app, run_named)
    _add_samples(app, run_named)


def _add_samples(app: FastAPI, run_named: Callable[[str], ViewedRun]) -> None:
    def sampled(name: str, source: str, other: str) -> list[dict[str, Any]]:
        return samples({run: run_named(run).folder for run in (name, other) if run}, source)

    @app.get("/api/runs/{name:path}/samples/{source}")
    def of_source(name: str, source: str, step: Number | None = None, group: str = "", other: str = "") -> Json:
        """Return the samples of a source as rows of the table; beside those of the run `other`, of the last step."""
        rows = [row for row in sampled(name, source, other) if step in (None, row["step"]) and group in row["task"]]
        return {"rollouts": rows, "before": None}

    @app.get("/api/runs/{name:path}/samples/{source}/{task}")
    def of_task(name: str, source: str, task: Number, other: str = "") -> Json:
        rows = [row for row in sampled(name, source, other) if row["id"] == task]
        if not rows:
            raise HTTPException(404, f"{source} has no samples of task {task}")
        return {"id": task, "task": rows[0]["task"], "source": source, "rollouts": _with_words(rows)}


def _add_groups(app: FastAPI, run_named: Callable[[str], ViewedRun]) -> None:
    @app.get("/api/runs/{name:path}/rollouts")
    def rollouts(
        name: str, step: Number | None = None, version: Number | None = None, group: str = "", state: str = "",
        before: Id | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the rollouts of a page of groups, newest first, one table row each; one row for a group without
        rollouts."""
        if state and state.upper() not in State.__members__:
            raise HTTPException(404, f"there is no state {state}")
        run = run_named(name)
        with run.read() as (connection, t):
            page = find_groups(connection, t, GroupFilter(step, version, group, state), before, TABLE_GROUPS)
        return {"rollouts": [row for entry in page.groups for row in _rows(run, entry)], "before": page.before}

    @app.get("/api/runs/{name:path}/groups/{group_id:int}")
    def one_group(name: str, group_id: Id) -> dict[str, Any]:
        run = run_named(name)
        row = _group(run, group_id)
        return row | {"rollouts": _with_words(_rollouts(run, row))}

    @app.get("/api/runs/{name:path}/groups/{group_id:int}/rollouts/{place}/tokens")
    def tokens(
        name: str, group_id: Id, place: Id, offset: Id = 0, limit: Annotated[int, Query(ge=1, le=PAGE)] = PAGE
    ) -> dict[str, Any]:
        run = run_named(name)
        experiences = run.experiences(group_id)
        if place >= len(experiences):
            raise HTTPException(404, f"group {group_id} has no stored rollout {place}")
        lines = _archived_lines(run, _group(run, group_id))
        advantage = lines[place].get("advantage") if place < len(lines) else None
        return token_page(experiences[place], run.tokenizer, advantage, offset, limit)


def _group(run: ViewedRun, group_id: int) -> dict[str, Any]:
    with run.read() as (connection, t):
        row = group_row(connection, t, group_id)
    if row is None:
        raise HTTPException(404, f"there is no group {group_id}")
    return row


def _archived_lines(run: ViewedRun, row: Mapping[str, Any]) -> list[Line]:
    """Return a group's rows in the latest batch that had it."""
    return [line for step in row["train_steps"][-1:] for line in run.archived(step, row["group"], row["id"])]


def _rollouts(run: ViewedRun, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a group's rollouts from the store or, without tokens, from the archive; empty for a failed task."""
    lines = _archived_lines(run, row)
    if not row["stored"]:
        return [_archived(line) for line in lines]
    advantages = chain((line.get("advantage") for line in lines), repeat(None))
    return [_rollout(*pair) for pair in zip(run.experiences(row["id"]), advantages, strict=False)]


def _rows(run: ViewedRun, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a group's rollouts for the table; without rollouts, one row with the task's outcome."""
    group = {name: entry[name] for name in ("id", "step", "task", "state")}
    none: dict[str, Any] = {"prompt": "", "response": entry["failure"] or "", "truth": "", "metrics": {}}
    rollouts = _rollouts(run, entry) or [none | dict.fromkeys(("reward", "advantage", "response_length"))]
    return [group | {"place": place} | rollout for place, rollout in enumerate(rollouts)]


def _mean(advantage: Advantage | None) -> float | None:
    """Return the mean advantage over the tokens in the loss."""
    return fmean(advantage) if isinstance(advantage, list) else advantage


def _rollout(experience: Experience, advantage: Advantage | None) -> dict[str, Any]:
    """Return an experience without tokens, with its mean advantage. Long texts are cut."""
    sampled = [] if experience.versions is None else [one for one in experience.versions.tolist() if one >= 0]
    texts = ("prompt", "response", "truth")
    return {
        "run": experience.run, "turn": experience.turn, "reward": experience.total_reward,
        "metrics": experience.metrics, "truncated": experience.truncated,
        "prompt_length": experience.prompt_length, "response_length": experience.response_length,
        "actions": int(experience.action_mask.sum()), "is_expert": experience.is_expert,
        "oldest": min(sampled, default=-1), "newest": max(sampled, default=-1),
        "advantage": _mean(advantage),
        **{name: _cut(experience.info.get(name, "")) for name in texts},
        "info": {_cut(name): _cut(value) for name, value in experience.info.items() if name not in texts},
    }  # fmt: skip


def _archived(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the archive in the format of `_rollout`."""
    texts = {name: _cut(line.get(name, "")) for name in ("prompt", "response", "truth")}
    fields = ("run", "turn", "reward", "metrics", "truncated", "is_expert")
    lengths = {"prompt_length": line["prompt_tokens"], "response_length": line["response_tokens"], "actions": None}
    version = {"oldest": line["policy_version"], "newest": line["policy_version"]}
    version |= {"advantage": _mean(line.get("advantage"))}
    return {name: line[name] for name in fields} | lengths | version | texts | {"info": {}, "archived": True}


def samples(folders: Mapping[str, Path], source: str) -> list[Json]:
    """Return the samples of a source, by step, in the format of `_rollout`, with the place of each among those of its
    task. Of several runs, by name, return those of the last step of each."""
    rows, places = list[Json](), Counter[int]()
    for name, folder in folders.items():
        steps = [(step, path) for of, step, path in rollout_files(folder) if of == source]
        for step, path in steps if len(folders) == 1 else steps[-1:]:
            for one in read_rollouts(path):
                label = f"step {step}" + (f", repeat {one.run}" if one.run else "")
                rows.append({
                    "id": one.task_index, "place": places[one.task_index], "task": f"{source} {one.task_index}",
                    "label": label if len(folders) == 1 else f"{label} of {name}", "step": step,
                    "run": one.run, "turn": 0, "reward": one.reward, "metrics": one.parts, "advantage": None,
                    "truncated": bool(one.parts.get("truncated")), "is_expert": False, "archived": True,
                    "response_length": one.parts.get("response_length"), "oldest": step, "newest": step,
                    "prompt": _cut(one.prompt), "response": _cut(one.response), "truth": _cut(one.truth),
                })  # fmt: skip
                places[one.task_index] += 1
    return rows


def _with_words(rollouts: Sequence[Json]) -> list[Json]:
    return [one | {"words": words_found(one["truth"], one["response"])} for one in rollouts]


def words_found(reference: str, answer: str) -> list[tuple[str, bool]]:
    """Return each word of a reference answer, of a long one the last, and whether the answer has it in its place."""
    words, others = reference.split()[-MOST_WORDS:], answer.split()[-MOST_WORDS:]
    blocks = SequenceMatcher(None, words, others, autojunk=False).get_matching_blocks()
    found = {block.a + i for block in blocks for i in range(block.size)}
    return [(word, i in found) for i, word in enumerate(words)]


def _cut(value: Any) -> str:
    """Return a text fit for sending: limited in length, without unpaired surrogates."""
    text = str(value).encode(errors="replace").decode()
    return (
        text if len(text) <= TEXT else f"{text[: TEXT // 2]}\n… {len(text) - TEXT} characters …\n{text[-TEXT // 2 :]}"
    )


@dataclass(frozen=True)
class GroupFilter:
    """Filter for groups; None and "" match all."""

    step: int | None = None
    version: int | None = None
    """The newest policy version that sampled a token of the group."""
    group: str = ""
    """Substring of the group's or task's name."""
    state: str = ""
    """A name of `State` in lower case."""


@dataclass(frozen=True)
class GroupPage:
    groups: list[Json]
    before: int | None
    """The next page begins before this id; None: this is the last page."""


def find_groups(
    connection: Connection, t: Tables, criteria: GroupFilter, before: int | None = None, limit: int = 30
) -> GroupPage:
    query = groups_query(t, criteria, before).limit(limit + 1)
    rows = connection.execute(query).all()
    page = rows[:limit]
    return GroupPage(_entries(connection, t, page), page[-1].id if len(rows) > limit else None)


def group_row(connection: Connection, t: Tables, group_id: int) -> Json | None:
    rows = connection.execute(select(t.groups).where(t.groups.c.id == group_id)).all()
    return next(iter(_entries(connection, t, rows)), None)


def groups_query(t: Tables, criteria: GroupFilter, before: int | None = None) -> Select[Any]:
    """Select the matching groups, newest first, in one pass by primary key."""
    g = t.groups.c
    query = select(t.groups).order_by(g.id.desc())
    if before is not None:
        query = query.where(g.id < before)
    if criteria.step is not None:
        query = query.where(g.step == criteria.step)
    if criteria.version is not None:
        query = query.where(g.newest == criteria.version)
    if criteria.group:
        query = query.where(
            g.name.contains(criteria.group, autoescape=True) | g.task.contains(criteria.group, autoescape=True)
        )
    if criteria.state:
        query = query.where(g.state == int(State[criteria.state.upper()]))
    return query


def _entries(connection: Connection, t: Tables, rows: Sequence[Row[Any]]) -> list[Json]:
    """Return groups as JSON. `stored`: their experiences are in the store; `train_steps`: the steps whose batches
    contain them."""
    ids = [row.id for row in rows]
    experiences, batches = t.experiences.c, t.lease_groups.c
    stored = {*connection.scalars(select(experiences.group_id).where(experiences.group_id.in_(ids)))}
    # A batch contains only groups older than its step.
    since = batches.step > min((row.newest for row in rows), default=0)
    train_steps: dict[int, list[int]] = defaultdict(list)
    for step, group in connection.execute(
        select(batches.step, batches.group_id).where(since, batches.group_id.in_(ids)).order_by(batches.step)
    ):
        train_steps[group].append(step)
    return [
        {
            "id": row.id, "group": row.name, "step": row.step, "task": row.task,
            "state": State(row.state).name.lower(), "size": row.size, "newest": row.newest, "oldest": row.oldest,
            "tries": row.tries, "failure": row.failure, "dropped": json.loads(row.dropped) if row.dropped else {},
            "stored": row.id in stored, "train_steps": train_steps[row.id],
        }
        for row in rows
    ]  # fmt: skip
