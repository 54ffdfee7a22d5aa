"""Write task sets for environments: `train.jsonl`, `test.jsonl`, and with `--examples` also `sft.jsonl` for a warm-up.

    python configs/environment_tasks.py frozen_lake --out lake --examples 1500
    python configs/environment_tasks.py reasoning_gym --out sums --args '{"dataset": "chain_sum"}'

A task of an environment is a prompt and a seed. One of reasoning-gym has question, answer and what the verifier reads.
Examples show how to answer, but are right only with probability `--skill`: a warm-up teaches the form, and exploration
must find out what is right. Otherwise they play at random, or give another question's answer. In an environment that
does not list its moves, such as an OpenEnv server's, moves are drawn from `--actions`, and with probability `--skill`
an episode is played again until it earns `--enough`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trinity_core.base.errors import InputError
from trinity_core.base.files import clear_errors
from trinity_core.data.formats import Message
from trinity_core.workflows import ENVIRONMENTS, EnvArguments, Environment, EnvironmentFailed, load_plugins
from trinity_core.workflows.environments.protocol import as_step, check_installed
from trinity_core.workflows.environments.reasoning import rows as questions
from trinity_core.workflows.environments.workflow import called, first_messages, opened

load_plugins(Path(__file__).parent / "toy_text")
from planning import Transitions, move_values  # noqa: E402
from toy_text import ToyText  # noqa: E402

FORESIGHT = 100
"""Moves that best play of an example looks ahead, with a discount that prefers short ways."""
DISCOUNT = 0.95
MOST_ATTEMPTS = 1000
"""At one episode that is to go well."""


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", choices=sorted(ENVIRONMENTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--args", type=json_object, default={}, help="arguments of the environment, JSON")
    parser.add_argument("--prompt", default="Play.", help="begins each task but reasoning-gym's")
    parser.add_argument("--train", type=int, default=512)
    parser.add_argument("--test", type=int, default=64)
    parser.add_argument("--examples", type=int, default=0)
    parser.add_argument("--skill", type=float, default=0.4)
    parser.add_argument("--moves", type=int, default=10, help="most moves of an example")
    parser.add_argument("--actions", nargs="+", default=[], help="what examples say where the moves are not listed")
    parser.add_argument("--enough", type=float, default=1.0, help="return of an episode that went well, with --actions")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    check_installed(options.environment, ENVIRONMENTS[options.environment])
    try:
        splits = split_rows(options)
    except (InputError, EnvironmentFailed) as error:
        parser.exit(1, f"error: {error}\n")
    except ValidationError as error:
        parser.exit(1, f"error: {'; '.join(problem['msg'] for problem in error.errors())}\n")
    with clear_errors("writing to", options.out, "choose another folder"):
        options.out.mkdir(parents=True, exist_ok=True)
        for split, rows in splits.items():
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (options.out / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def json_object(text: str) -> dict[str, Any]:
    """Read `--args`. Raises `ArgumentTypeError` on anything but a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, but is no JSON ({error}): {text}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object such as '{{\"size\": 4}}', not {text}")
    return value


def split_rows(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """split → rows. Seeds, or positions in reasoning-gym's stream, are those of one split only."""
    rng = random.Random(options.seed)
    sizes = {"train": options.train, "test": options.test}
    if options.environment == "reasoning_gym":
        every = questions(
            options.args["dataset"],
            options.seed,
            sum(sizes.values()) + options.examples,
            options.args.get("config", {}),
        )
        splits = {split: list(islice(every, size)) for split, size in sizes.items()}
        return splits | ({"sft": answered(list(every), options.skill, rng)} if options.examples else {})
    splits, first = {}, 0
    for split, size in sizes.items():
        splits[split] = [{"prompt": options.prompt, "seed": first + number} for number in range(size)]
        first += size
    if options.examples:
        splits["sft"] = [
            {"messages": messages} for messages in examples(options, range(first, first + options.examples), rng)
        ]
    return splits


def examples(options: argparse.Namespace, seeds: range, rng: random.Random) -> list[list[Message]]:
    """The conversation of one episode for each seed."""
    kind = ENVIRONMENTS[options.environment]
    if issubclass(kind, ToyText):
        if options.actions:
            raise InputError(f"--actions has no effect: '{options.environment}' lists its moves")
        environment, plan = kind(**options.args), BestPlay()
        return [played(environment, seed, options, rng, plan) for seed in seeds]
    if not options.actions:
        raise InputError(f"'{options.environment}' does not list its moves: say what examples say, --actions A B …")
    wanted = {"environment": options.environment, "environment_args": options.args, "max_turns": options.moves}
    arguments = EnvArguments.model_validate(wanted)
    player = RandomPlayer(arguments, options.prompt, options.actions, rng, options.skill, options.enough)
    return player.episodes(seeds)


class BestPlay:
    """The best moves, recomputed only for transitions other than the last ones."""

    def __init__(self) -> None:
        self._of: Transitions = {}
        self._values: dict[Any, list[float]] = {}

    def moves(self, transitions: Transitions, state: Any) -> list[int]:
        """Those of the largest value in a state; none where transitions are not known."""
        if transitions != self._of:
            self._of, self._values = transitions, move_values(transitions, FORESIGHT, DISCOUNT)
        return best_moves(self._values.get(state, ()))


def played(
    environment: ToyText, seed: int, options: argparse.Namespace, rng: random.Random, plan: BestPlay
) -> list[Message]:
    """The conversation of one episode: the best move with a chance of `skill`, else any."""
    said, *_ = environment.reset(seed)
    messages = first_messages([{"role": "user", "content": options.prompt}], said)
    transitions = environment.transitions
    for number in range(options.moves):
        if number:
            messages.append({"role": "user", "content": said})
        best = plan.moves(transitions, environment.seen)
        move = rng.choice(best) if best and rng.random() < options.skill else rng.randrange(len(environment.moves))
        messages.append({"role": "assistant", "content": environment.moves[move]})
        said, _, done, _ = environment.step(environment.moves[move])
        if done:
            break
    return messages


def best_moves(values: Any) -> list[int]:
    """The moves of the largest value."""
    return [move for move, value in enumerate(values) if value >= max(values) - 1e-9]


@dataclass(frozen=True)
class RandomPlayer:
    """Says any of `actions`."""

    arguments: EnvArguments
    prompt: str
    actions: Sequence[str]
    rng: random.Random
    skill: float
    """The chance that an episode is played again until it earns `enough`."""
    enough: float

    def episodes(self, seeds: Iterable[int]) -> list[list[Message]]:
        """The conversation of one episode for each seed.

        Raises EnvironmentFailed if one fails, InputError if one does not go well in `MOST_ATTEMPTS` attempts.
        """

        async def every() -> list[list[Message]]:
            return [await self._shown(seed) for seed in seeds]

        return asyncio.run(every())

    async def _shown(self, seed: int) -> list[Message]:
        again = self.rng.random() < self.skill
        async with opened(self.arguments, {}) as environment:
            for _ in range(MOST_ATTEMPTS):
                messages, earned = await self._played(environment, seed)
                if earned >= self.enough or not again:
                    return messages
        raise InputError(f"no episode with seed {seed} earned {self.enough:g} in {MOST_ATTEMPTS} attempts at random")

    async def _played(self, environment: Environment, seed: int) -> tuple[list[Message], float]:
        """The conversation of an episode and its return."""
        step = as_step(await called(environment.reset, self.arguments.time_limit, seed))
        messages = first_messages([{"role": "user", "content": self.prompt}], step.observation)
        earned = step.reward
        for turn in range(self.arguments.max_turns):
            if turn:
                messages.append({"role": "user", "content": step.observation})
            messages.append({"role": "assistant", "content": self.rng.choice(self.actions)})
            step = as_step(await called(environment.step, self.arguments.time_limit, messages[-1]["content"]))
            earned += step.reward
            if step.done:
                break
        return messages, earned


def answered(rows: list[dict[str, Any]], skill: float, rng: random.Random) -> list[dict[str, Any]]:
    """Conversations in which the question is answered, rightly with a chance of `skill`."""
    return [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": (row if rng.random() < skill else rng.choice(rows))["answer"]},
            ]
        }
        for row in rows
    ]


if __name__ == "__main__":
    main()
