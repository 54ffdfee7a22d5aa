"""Reward models: sequence classifiers with one output (transformers), each in its own Ray actor."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.base.errors import DataError, TransientFault, TrinityError
from trinity_core.base.lazy import OWN_ATTENTION
from trinity_core.config.training import dtype_of
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.formats import Message
from trinity_core.data.tokenizer import load_tokenizer, model_file
from trinity_core.exchange.tracking.logs import logged, start_log
from trinity_core.rollout.inference.remote import answer

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

BATCH_TOKENS = 16384
"""Tokens of one forward pass, padding included."""
ARCHITECTURE = "ForSequenceClassification"
ON_ONE_GPU = "a reward model runs on one GPU each: set it to 1"
"""Why a reward model's `tensor_parallel_size` above 1 is refused."""


def is_reward_model(model_path: str) -> bool:
    """True if the architecture in a model's `config.json` is a sequence classifier."""
    path = model_file(model_path, "config.json")
    if path is None:
        return False
    return has_reward_head(json.loads(Path(path).read_text(encoding="utf-8")))


def has_reward_head(config: Mapping[str, Any]) -> bool:
    """True if the architecture in a `config.json` is a sequence classifier."""
    return any(str(name).endswith(ARCHITECTURE) for name in config.get("architectures") or ())


class RewardEngine:
    """One reward model; a plain class, and a Ray actor in a run.

    Raises `TrinityError` for a model that is not a reward model, or whose tokenizer has no chat template.
    """

    def __init__(
        self, model_path: str, longest: int, on_gpu: bool = False, dtype: str = "auto", trust_remote_code: bool = False
    ) -> None:
        start_log()
        self.model_path, self.longest, self.on_gpu = model_path, longest, on_gpu
        self._dtype = dtype_of(dtype, on_gpu)
        self._trust, self._model = trust_remote_code, None
        self._encoder: ChatEncoder | None = None

    def start(self) -> float:
        """Load the model; return the seconds it took. Does nothing if it is loaded."""
        began = time.perf_counter()
        if self._model is None:
            with logged(f"the start of the reward model {self.model_path}", log):
                self._load()
        return time.perf_counter() - began

    def rate(self, conversations: Sequence[Sequence[Message]]) -> list[float | str]:
        """Return the score of each conversation, or why it has none (such as its length)."""
        self.start()
        rated: list[float | str] = [""] * len(conversations)
        rows: list[tuple[int, list[int]]] = []
        assert self._encoder is not None
        for index, messages in enumerate(conversations):
            try:
                tokens = self._encoder.tokens(messages)
            except DataError as error:
                rated[index] = f"of the reward model, {error}"
                continue
            if len(tokens) > self.longest:
                rated[index] = (
                    f"the answer with its prompt has {len(tokens)} tokens, the reward model takes {self.longest}"
                )
            else:
                rows.append((index, tokens))
        for batch in batches(sorted(rows, key=lambda row: len(row[1]))):
            for (index, _), score in zip(batch, self._scores([tokens for _, tokens in batch]), strict=True):
                rated[index] = score if score - score == 0 else f"the reward model gave {score}"
        return rated

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification

        if not is_reward_model(self.model_path):
            raise TrinityError(
                f"{self.model_path} is not a reward model: its architecture does not end with {ARCHITECTURE}",
                key=self.model_path,
            )
        tokenizer = load_tokenizer(self.model_path, self._trust)
        if tokenizer.chat_template is None:
            raise TrinityError(f"the tokenizer of the reward model {self.model_path} has no chat template")
        loaded = AutoModelForSequenceClassification.from_pretrained(
            self.model_path, dtype=getattr(torch, self._dtype), trust_remote_code=self._trust, **OWN_ATTENTION
        )
        if loaded.config.num_labels != 1:
            raise TrinityError(f"a reward model has one output, and {self.model_path} has {loaded.config.num_labels}")
        self._model, self._encoder = loaded.eval().to("cuda" if self.on_gpu else "cpu"), ChatEncoder(tokenizer)

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Score one padded batch. The padding token occurs in no row: models use the last token that is not padding."""
        import torch

        model: Any = self._model
        used = set(itertools.chain.from_iterable(rows))
        padding = next(token for token in itertools.count() if token not in used)
        model.config.pad_token_id = padding
        width = max(map(len, rows))
        tokens = torch.full((len(rows), width), padding, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = 1
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=tokens.to(model.device), attention_mask=mask.to(model.device)).logits
        return [float(score) for score in logits[:, 0].float().cpu()]


def batches(rows: Sequence[tuple[int, Sequence[int]]]) -> Iterator[list[tuple[int, Sequence[int]]]]:
    """Yield batches of rows, sorted by length, of at most `BATCH_TOKENS` with padding, and of at least one row."""
    batch: list[tuple[int, Sequence[int]]] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(row[1]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@dataclass
class RewardEngines:
    """The engines of one reward model, used from one event loop: each call goes to the least busy one."""

    engines: Sequence[Any]
    """`RewardEngine`s, or handles of actors."""
    name: str
    start_seconds: float
    seconds: float
    """Time limit of one call, without its wait for earlier calls."""
    _busy: list[int] = field(init=False)
    _turns: list[asyncio.Lock] = field(init=False)

    def __post_init__(self) -> None:
        self._busy, self._turns = [0] * len(self.engines), [asyncio.Lock() for _ in self.engines]

    async def start(self) -> None:
        await asyncio.gather(*(self._call(index, "start", self.start_seconds) for index in range(len(self.engines))))

    async def rate(self, conversations: Sequence[Sequence[Message]]) -> list[float | str]:
        """See `RewardEngine.rate`. Raises TransientFault if an engine is lost or takes too long."""
        index = min(range(len(self.engines)), key=self._busy.__getitem__)
        self._busy[index] += 1
        try:
            async with self._turns[index]:
                return await self._call(index, "rate", self.seconds, list(conversations))
        finally:
            self._busy[index] -= 1

    async def _call(self, index: int, verb: str, seconds: float, *arguments: Any) -> Any:
        engine, who = self.engines[index], f"the reward model {self.name}"
        try:
            async with asyncio.timeout(seconds):
                if isinstance(engine, RewardEngine):
                    return await asyncio.to_thread(getattr(engine, verb), *arguments)
                return await answer(who, engine, verb, *arguments)
        except TimeoutError:
            raise TransientFault(f"{who} did not {verb} within {seconds:g} s") from None
