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
from difflib import SequenceMatcher
from itertools import chain, repeat
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any
from zlib import crc32

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field
from sqlalchemy import Connection, Row, or_, select

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.gate import Gate, asked_for, server_key
from trinity_core.data.experience import Experience
from trinity_core.exchange.store.archive import Advantage, Line, as_line
from trinity_core.exchange.store.schema import State, Tables
from trinity_core.exchange.tracking.rollouts import read_rollouts, rollout_files
from trinity_core.view.tokens import token_page
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
        raise TrinityError(f"cannot serve on {host}:{port}: {error}; give another --port or --host") from error
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

    async def refused(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 503 if isinstance(error, TransientFault) else 404)

    handlers: dict[int | type[Exception], Any] = {TrinityError: refused, TransientFault: refused}
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, exception_handlers=handlers)
    app.state.runs = runs
    app.include_router(api)
    app.mount("/static", StaticFiles(directory=STATIC))

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    @app.get("/")
    def page() -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8")

    return app


def run_named(request: Request, name: str) -> ViewedRun:
    try:
        return request.app.state.runs[name]
    except KeyError:
        raise HTTPException(404, f"there is no run {name}") from None


def samples(request: Request, name: str, source: str, other: str = "") -> list[Json]:
    """Return the samples of a source, by step, in the format of `_rollout`, with the place of each among those of its
    task. Beside those of the run `other`, return those of the last step of each."""
    rows, places = list[Json](), Counter[int]()
    for run in filter(None, (name, other)):
        steps = [(step, path) for of, step, path in rollout_files(run_named(request, run).folder) if of == source]
        for step, path in steps[-1:] if other else steps:
            for one in read_rollouts(path):
                number = crc32(one.task.encode()) if one.task else one.task_index
                label = f"step {step}" + (f", repeat {one.run}" if one.run else "") + (f" of {run}" if other else "")
                rows.append({
                    "id": number, "place": places[number], "task": one.task or f"{source} {one.task_index}",
                    "label": label, "step": step, "run": one.run, "reward": one.reward, "metrics": one.parts,
                    "truncated": bool(one.parts.get("truncated")), "archived": True, "oldest": step, "newest": step,
                    "response_length": one.parts.get("response_length"),
                    "prompt": _cut(one.prompt), "response": _cut(one.response), "truth": _cut(one.truth),
                })  # fmt: skip
                places[number] += 1
    return rows


class GroupFilter(BaseModel):
    """Filter for groups; None and "" match all."""

    step: Number | None = None
    version: Number | None = None
    """The newest policy version that sampled a token of the group."""
    task: str = ""
    """Substring of the group's or task's name."""
    state: str = Field("", pattern=f"^({'|'.join(State.__members__).lower()})?$")
    before: Id | None = None
    """Groups with smaller ids only."""


api = APIRouter(prefix="/api/runs")
Run = Annotated[ViewedRun, Depends(run_named)]
Samples = Annotated[list[Json], Depends(samples)]


@api.get("")
def names(request: Request) -> list[str]:
    return list(request.app.state.runs)


@api.get("/{name:path}/about")
def about(run: Run) -> Json:
    sources = {(not source.startswith("eval"), source) for source, _, _ in rollout_files(run.folder)}
    return {"folder": str(run.folder), "sources": [source for _, source in sorted(sources)], "has_store": run.has_store}


@api.get("/{name:path}/rollouts")
def rollouts(run: Run, criteria: Annotated[GroupFilter, Query()]) -> Json:
    """Return the rollouts of a page of groups, newest first, one table row each; one row for a group without
    rollouts."""
    with run.read() as (connection, t):
        groups, before = find_groups(connection, t, criteria)
    return {"rollouts": [row for group in groups for row in _rows(run, group)], "before": before}


@api.get("/{name:path}/groups/{group_id:int}")
def one_group(run: Run, group_id: Id) -> Json:
    group = _group(run, group_id)
    return group | {"rollouts": _with_words(_rollouts(run, group))}


@api.get("/{name:path}/groups/{group_id:int}/rollouts/{place}/tokens")
def tokens(run: Run, group_id: Id, place: Id, offset: Id = 0) -> Json:
    experiences = run.experiences(group_id)
    if place >= len(experiences):
        raise HTTPException(404, f"group {group_id} has no stored rollout {place}")
    lines = _archived_lines(run, _group(run, group_id))
    advantage = lines[place].get("advantage") if place < len(lines) else None
    return token_page(experiences[place], run.tokenizer, advantage, offset)


@api.get("/{name:path}/samples/{source}")
def of_source(rows: Samples, step: Number | None = None, task: str = "") -> Json:
    """Return the samples of a source as rows of the table."""
    return {"rollouts": [row for row in rows if step in (None, row["step"]) and task in row["task"]], "before": None}


@api.get("/{name:path}/samples/{source}/{task}")
def of_task(rows: Samples, source: str, task: Number) -> Json:
    of_this = [row for row in rows if row["id"] == task]
    if not of_this:
        raise HTTPException(404, f"{source} has no samples of task {task}")
    return {"id": task, "task": of_this[0]["task"], "source": source, "rollouts": _with_words(of_this)}


def _group(run: ViewedRun, group_id: int) -> Json:
    with run.read() as (connection, t):
        rows = connection.execute(select(t.groups).where(t.groups.c.id == group_id)).all()
        if not rows:
            raise HTTPException(404, f"there is no group {group_id}")
        return _entries(connection, t, rows)[0]


def _archived_lines(run: ViewedRun, group: Json) -> list[Line]:
    """Return a group's rows in the latest batch that had it."""
    return [line for step in group["train_steps"][-1:] for line in run.archived(step, group["group"], group["id"])]


def _rollouts(run: ViewedRun, group: Json) -> list[Json]:
    """Return a group's rollouts from the store or, without tokens, from the archive; empty for a failed task."""
    lines = _archived_lines(run, group)
    if not group["stored"]:
        return [_rollout(line) | {"archived": True} for line in lines]
    advantages = chain((line.get("advantage") for line in lines), repeat(None))
    return [_stored(*pair) for pair in zip(run.experiences(group["id"]), advantages, strict=False)]


def _rows(run: ViewedRun, group: Json) -> list[Json]:
    """Return a group's rollouts for the table; without rollouts, one row with the task's outcome."""
    of_group = {name: group[name] for name in ("id", "step", "task", "state")}
    outcome: Json = {"prompt": "", "response": group["failure"] or "", "truth": "", "metrics": {}, "reward": None}
    return [of_group | {"place": place} | row for place, row in enumerate(_rollouts(run, group) or [outcome])]


def _rollout(line: Line) -> Json:
    """Return a line of the archive for the page, with its mean advantage over the tokens in the loss. Long texts are
    cut."""
    advantage, version = line.get("advantage"), line["policy_version"]
    return {
        **{name: line[name] for name in ("run", "turn", "reward", "metrics", "truncated", "is_expert")},
        **{name: _cut(line.get(name, "")) for name in ("prompt", "response", "truth")},
        "prompt_length": line["prompt_tokens"], "response_length": line["response_tokens"],
        "oldest": version, "newest": version,
        "advantage": fmean(advantage) if isinstance(advantage, list) else advantage,
    }  # fmt: skip


def _stored(experience: Experience, advantage: Advantage | None) -> Json:
    """Return an experience, without its tokens, in the format of `_rollout`."""
    row = _rollout(as_line(0, experience) | {"advantage": advantage})
    versions = [] if experience.versions is None else experience.versions.tolist()
    oldest = min((version for version in versions if version >= 0), default=row["newest"])
    return row | {"actions": int(experience.action_mask.sum()), "oldest": oldest}


def _with_words(rollouts: Sequence[Json]) -> list[Json]:
    return [one | {"words": words_found(one["truth"], one["response"])} for one in rollouts]


def words_found(reference: str, answer: str) -> list[tuple[str, bool]]:
    """Return each word of a reference answer, of a long one the last, and whether the answer has it in its place."""
    words, others = reference.split()[-MOST_WORDS:], answer.split()[-MOST_WORDS:]
    blocks = SequenceMatcher(None, words, others, autojunk=False).get_matching_blocks()
    found = {block.a + i for block in blocks for i in range(block.size)}
    return [(word, i in found) for i, word in enumerate(words)]


def _cut(value: Any) -> str:
    """Return a text fit for sending: limited in length, without unpaired surrogates; empty for None."""
    text = ("" if value is None else str(value)).encode(errors="replace").decode()
    if len(text) <= TEXT:
        return text
    return f"{text[: TEXT // 2]}\n… {len(text) - TEXT} characters …\n{text[-TEXT // 2 :]}"


def find_groups(
    connection: Connection, t: Tables, criteria: GroupFilter, limit: int = TABLE_GROUPS
) -> tuple[list[Json], int | None]:
    """Return the newest matching groups, and before which id there are more, None on the last page. One pass by primary
    key."""
    g = t.groups.c
    state = State[criteria.state.upper()].value if criteria.state else None
    equal = [(g.step, criteria.step), (g.newest, criteria.version), (g.state, state)]
    query = select(t.groups).where(*(column == value for column, value in equal if value is not None))
    if criteria.before is not None:
        query = query.where(g.id < criteria.before)
    if criteria.task:
        query = query.where(or_(*(name.contains(criteria.task, autoescape=True) for name in (g.name, g.task))))
    rows = connection.execute(query.order_by(g.id.desc()).limit(limit + 1)).all()
    page = rows[:limit]
    return _entries(connection, t, page), page[-1].id if len(rows) > limit else None


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
            "state": State(row.state).name.lower(), "newest": row.newest, "oldest": row.oldest,
            "tries": row.tries, "failure": row.failure, "dropped": json.loads(row.dropped) if row.dropped else {},
            "stored": row.id in stored, "train_steps": train_steps[row.id],
        }
        for row in rows
    ]  # fmt: skip
