"""The policy as a workflow sees it when its engines also serve the OpenAI API."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from trinity_core.data.experience import Experience
from trinity_core.data.session_log import ANSWERS, SESSION
from trinity_core.data.task import Task
from trinity_core.data.turns import nothing_sampled
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.openai_api.recorded_session import RecordedSession, SessionTerms
from trinity_core.rollout.openai_api.server import ApiServer
from trinity_core.workflows.rewards import Reward
from trinity_core.workflows.rollout_model import RecordingModel, RolloutModel, with_reward

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

UNCHANGED: dict[str, Any] = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "min_tokens": 0,
}
"""Sampling arguments under which answers come from the policy's own distribution."""


LOCAL: dict[str, Any] = {"trust_env": False, "verify": False, "timeout": None}
"""Arguments of the clients' connections to this process: no proxy, whatever the machine's settings; no encryption, as
reading the certificates would take 20 ms for each client; no time limit, as the session ends with its workflow."""


@dataclass(eq=False)
class OpenSession:
    """See `trinity_core.workflows.agent.RolloutSession`. Safe to use from any thread."""

    server: ApiServer
    session: RecordedSession
    model_name: str
    tokenizer: Any
    taken_tokens: int = 0
    """Sampled tokens handed out in experiences."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def base_url(self) -> str:
        return self.server.base_url(self.session)

    @property
    def api_key(self) -> str:
        return self.server.session_key

    @cached_property
    def openai_client(self) -> OpenAI:
        from openai import DefaultHttpxClient, OpenAI

        return OpenAI(**self._client_args, http_client=DefaultHttpxClient(**LOCAL))

    @cached_property
    def openai_async_client(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        return AsyncOpenAI(**self._client_args, http_client=DefaultAsyncHttpxClient(**LOCAL))

    @property
    def _client_args(self) -> dict[str, Any]:
        return {"base_url": self.base_url, "api_key": self.api_key, "timeout": None}

    def end(self) -> None:
        """Refuse later requests; cancel those in flight."""
        self.server.close(self.session)

    def experiences(self, reward: Reward | float | None = None, **fields: Any) -> list[Experience]:
        self.end()
        sequences = self.session.sequences()
        guided_tokens = self.session.guided[1]  # they are in the sequences as context
        self.taken_tokens = guided_tokens + sum(int(sequence.mask.sum()) for sequence in sequences)
        if not sequences and reward is not None:
            sequences = [nothing_sampled(self.tokenizer.eos_token_id or 0)]
        rows = []
        for turn, sequence in enumerate(sequences):
            texts = self.tokenizer.batch_decode(
                [sequence.tokens[: sequence.prompt_length], sequence.tokens[sequence.prompt_length :]]
            )
            details = {"turn": turn, **fields}
            own = {"prompt": texts[0], "response": texts[1], SESSION: self.session.name, ANSWERS: sequence.answers}
            details["info"] = own | details.get("info", {})
            details["metrics"] = {"response_length": float(sequence.mask.sum())} | details.get("metrics", {})
            rows.append(sequence.experience(**with_reward(reward, details)))
        return rows


@dataclass(frozen=True, slots=True)
class ApiModels:
    server: ApiServer
    model_name: str
    sampling: Mapping[str, Any]
    """The policy's temperature, top_p and top_k."""
    pool: EnginePool

    def model(self, model: RolloutModel, task: Task) -> ApiModel:
        """Return the model for one attempt at a task."""
        return ApiModel(model, task, self)


class ApiModel(RecordingModel):
    """A workflow's model that also opens sessions. They end with the workflow in any case."""

    def __init__(self, model: RolloutModel, task: Task, api: ApiModels) -> None:
        super().__init__(model)
        self._task, self._api = task, api
        self._sessions: list[OpenSession] = []
        self._opened: Counter[int] = Counter()

    def session(self, run: int = 0) -> OpenSession:
        """Open a session for rollout `run` of the task. Each session has its own noise, so sessions of one rollout
        differ.

        Training answers use the run's sampling arguments, whatever a request sets: the trainer computes log-probs of
        that distribution. In an evaluation a request may override them. The task set's `max_tokens` limits answers
        whose request sets no limit.
        """
        number = self._opened[run]
        self._opened[run] += 1
        sampling = {**self._api.sampling, **self._task.sampling}
        max_tokens = sampling.pop("max_tokens", None)
        sampling.pop("structured_output", None)  # agents ask for their own grammars
        pinned = {} if self._task.is_eval else {**UNCHANGED, **sampling}
        seed = self._task.rollout_seed(run, conversation=f"session {number}")
        session = RecordedSession(SessionTerms(seed, sampling, pinned, max_tokens))
        self._api.server.open(session)
        self._sessions.append(OpenSession(self._api.server, session, self._api.model_name, self.tokenizer))
        return self._sessions[-1]

    @cached_property
    def _own(self) -> OpenSession:
        return self.session()

    @property
    def base_url(self) -> str:
        """The address of the workflow's own session."""
        return self._own.base_url

    @property
    def api_key(self) -> str:
        return self._own.api_key

    @property
    def model_name(self) -> str:
        return self._api.model_name

    @property
    def openai_client(self) -> OpenAI:
        """An `openai.OpenAI` client for the workflow's own session, for a `run` without `async`."""
        return self._own.openai_client

    @property
    def openai_async_client(self) -> AsyncOpenAI:
        return self._own.openai_async_client

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """Return the experiences of all calls since the record was last cleared, then those of the workflow's own
        session.

        The caller sets their rewards. Ends that session; a later request begins another. If it holds as many answers to
        one prompt as the task has rollouts (`n = repeat_times`), each is a rollout, not a turn.
        """
        history = super().extract_experience_from_history(clear_history)
        if "_own" in vars(self):
            recorded = self._own.experiences()
            answers = len(self._own.session.digests)  # also those without loss, whose tokens a grammar chose
            if len(recorded) == self._task.repeat_times == answers and have_one_prompt(recorded):
                for experience in recorded:
                    experience.turn = 0
            history += recorded
            del self._own
            if not clear_history:
                self._history += recorded
        return history

    def end(self) -> SessionCounts:
        """End all sessions; return their counts."""
        for session in self._sessions:
            session.end()
        return SessionCounts(
            len(self._sessions),
            sum(opened.taken_tokens for opened in self._sessions),
            sum(opened.session.sampled_tokens + opened.session.dropped_tokens for opened in self._sessions),
            sum(opened.session.guided[0] for opened in self._sessions),
            sum(opened.session.guided[1] for opened in self._sessions),
        )


def have_one_prompt(experiences: Sequence[Experience]) -> bool:
    return len({experience.tokens[: experience.prompt_length].tobytes() for experience in experiences}) == 1


@dataclass(slots=True)
class SessionCounts:
    """Number of sessions, their sampled tokens, and those of them that became experiences."""

    sessions: int = 0
    taken: int = 0
    sampled: int = 0
    guided: int = 0
    """Number of answers in a grammar."""
    guided_tokens: int = 0
    """Number of tokens chosen by a grammar."""

    def add(self, attempt: SessionCounts, succeeded: bool) -> None:
        """Count an attempt at a task. A failed one has no experiences."""
        self.sessions += attempt.sessions
        self.sampled += attempt.sampled
        self.guided += attempt.guided
        self.guided_tokens += attempt.guided_tokens
        self.taken += attempt.taken if succeeded else 0

    @property
    def discarded(self) -> int:
        """Sampled tokens that became no experience."""
        return self.sampled - self.taken
