"""An environment of verifiers: guess a number, in one turn (`single_agent`) or, with a hint, in two; or ask a tool."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Game", "Numbers"]


class Number(vf.TaskData):
    number: int


class Guess(vf.Task[Number]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.number))

    @vf.stop
    async def guessed_twice(self, trace: vf.Trace) -> bool:
        return trace.num_turns == 2


class Oracle(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    def is_less(self, least: int) -> str:
        """True if the number of task 1 is less than `least`."""
        return "yes" if least > 2 else "no"


class NumbersConfig(vf.TasksetConfig):
    largest: int = 9
    with_tools: bool = False


class Numbers(vf.Taskset[Guess, NumbersConfig]):
    @classmethod
    def toolsets(cls, config: NumbersConfig) -> list[vf.Toolset]:
        return [Oracle(vf.SharedToolsetConfig())] if config.with_tools else []

    def load(self) -> Iterator[Guess]:
        for number in range(1, self.config.largest + 1):
            yield Guess(Number(prompt="Guess my number.", system_prompt="Be brief.", number=number), self.config.task)


class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Game(vf.Env[GameConfig]):
    async def run(self, task: Guess, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as game:
            reply = await game.turn()
            while not reply.terminated and reply.last_reply != str(task.data.number):
                reply = await game.turn("lower" if int(reply.last_reply) > task.data.number else "higher")


if __name__ == "__main__":
    Oracle.run()
