"""`trinity chat`: a run's model beside the one that the run began with, with the run's template and sampling.

Plain transformers in this process, on a GPU if there is one: for a look at a model, not for traffic. `serve_command` is
the line that serves it with vLLM.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from json import dumps
from pathlib import Path
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.base.files import read_json
from trinity_core.base.layout import ADAPTER, JobLayout, now_at
from trinity_core.base.plugins import load_plugins
from trinity_core.config import ModelConfig
from trinity_core.config.findings import value_at
from trinity_core.config.schema import TasksetConfig
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.files import looks_local
from trinity_core.data.taskset import task_format
from trinity_core.data.tokenizer import policy_encoder, stop_tokens
from trinity_core.exchange.checkpoints.adapters import base_of, read_config
from trinity_core.exchange.checkpoints.convert import convert, is_complete
from trinity_core.exchange.checkpoints.resume import whole_steps
from trinity_core.exchange.model_fault import model_fault
from trinity_core.exchange.tracking import run_record
from trinity_core.results.audit import runs_in, stored_runs
from trinity_core.rollout.inference.vllm_types import LORA_RANKS

NEW = "/new"
"""The line that begins a new conversation."""
OVERRIDES = "trainer.trainer_config.actor_rollout_ref.model.override_config"
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")
OTHER_SAMPLING = ("min_p", "presence_penalty", "frequency_penalty", "max_new_tokens")
"""Defaults that vLLM would also take from a generation_config.json, and runs do not."""


@dataclass(frozen=True)
class ChatModel:
    """A model that answers as the engines of a run do."""

    path: str
    settings: ModelConfig
    """With the template, the lengths and the sampling of the run."""
    system: str | None = None
    adapter: Path | None = None
    """A LoRA adapter, in peft's format, of the model at `path`."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """The run's changes of the model's config.json, which a checkpoint's own has already."""

    @cached_property
    def encoder(self) -> ChatEncoder:
        return policy_encoder(self.settings.with_values({"model_path": self.path}))

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(
            self.path, dtype="auto", trust_remote_code=self.settings.trust_remote_code, **self.overrides
        )
        model.generation_config = GenerationConfig()  # the folder's has sampling of its own, which engines do not use
        if self.adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(self.adapter))
        return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def answer(self, messages: Iterable[Mapping[str, Any]], greedy: bool = False) -> str:
        """Return an answer to a conversation, sampled as in the run, or the likeliest one. Raises DataError if the
        template refuses the conversation or it is too long."""
        import torch

        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt, sampling = self.encoder.prompt([*system, *map(dict, messages)]).tokens, self.settings
        room = (sampling.max_model_len or 2**31) - len(prompt)
        if room < 1:
            fault = f"the conversation has {len(prompt)} tokens, of at most {sampling.max_model_len}: begin a new one"
            raise DataError(fault, key="model.max_model_len")
        ends = list(stop_tokens(self.path, self.encoder))
        choice: dict[str, Any] = {"do_sample": False}
        if sampling.temperature and not greedy:
            choice = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
            choice["top_k"] = max(sampling.top_k, 0)  # transformers: 0 is all
        most = min(room, sampling.max_response_tokens or room)
        least = min(max(sampling.min_response_tokens - 1, 0), most)  # counted without the end token
        tokens = torch.tensor([prompt], device=self._model.device)
        made = self._model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), eos_token_id=ends, pad_token_id=ends[0],
            max_new_tokens=most, min_new_tokens=least, repetition_penalty=sampling.repetition_penalty, **choice,
        )  # fmt: skip
        return str(self.encoder.tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True)).strip()

    def sampling_text(self, greedy: bool = False) -> str:
        """Return one sentence that says how answers are sampled, and how to change it."""
        if not self.settings.temperature:
            return "Answers are greedy, as in the run: the same each time."
        values = ", ".join(f"{key} {getattr(self.settings, key):g}" for key in SAMPLING)
        if greedy:
            return (
                f"Answers are greedy: the same each time. Without --greedy they are sampled as in training ({values})."
            )
        return f"Answers are sampled as in training ({values}), so they vary; --greedy gives the likeliest one."

    def serve_command(self, name: str) -> str:
        """Return the command that serves a checkpoint's model with vLLM: with its tokenizer, template and stop tokens,
        and the run's sampling as default."""
        sampling: dict[str, Any] = {key: getattr(self.settings, key) for key in SAMPLING}
        command, generation = ["vllm", "serve", self.path, "--served-model-name", name], "vllm"
        if self.adapter is not None:
            rank = next(size for size in LORA_RANKS if size >= read_config(self.adapter)["r"])
            generation = str(self.adapter.with_name("huggingface"))
            sampling |= dict.fromkeys(OTHER_SAMPLING)
            command = ["vllm", "serve", self.path, "--enable-lora", "--max-lora-rank", str(rank)]
            command += ["--lora-modules", f"{name}={self.adapter}", "--tokenizer", generation]
            if self.overrides:
                command += ["--hf-overrides", dumps(dict(self.overrides))]
        if self.settings.enable_thinking is not None:
            command += ["--default-chat-template-kwargs", dumps({"enable_thinking": self.settings.enable_thinking})]
        if self.settings.trust_remote_code:
            command += ["--trust-remote-code"]
        if self.settings.max_model_len:
            command += ["--max-model-len", str(self.settings.max_model_len)]
        command += ["--generation-config", generation, "--override-generation-config", dumps(sampling)]
        return shlex.join(command)


@dataclass
class Conversation:
    """One conversation with several models, each of which sees its own answers."""

    models: Mapping[str, ChatModel]
    greedy: bool = False
    turns: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def ask(self, text: str) -> dict[str, str]:
        """Return the answer of each model by its name. An error leaves the conversation as it was."""
        asked = {"role": "user", "content": text}
        turns = {name: [*self.turns.get(name, []), asked] for name in self.models}
        answers = {name: model.answer(turns[name], self.greedy) for name, model in self.models.items()}
        for name, answer in answers.items():
            self.turns[name] = [*turns[name], {"role": "assistant", "content": answer}]
        return answers


def last_trained(folder: Path) -> Path:
    """Return the run in `folder`, of a pipeline the last stage that has saved a checkpoint."""
    runs = [run for run in runs_in(folder.resolve()) if run.is_dir()]
    return next((run for run in reversed(runs) if whole_steps(run)), folder.resolve())


def chat_models(folder: Path, step: int | None = None, base: bool = True) -> dict[str, ChatModel]:
    """Return the model that the run in `folder` began with (if `base`) and that of `step` (default: the latest), which
    is converted if need be, by the names under which they are shown.

    Of a pipeline, the last stage's, beside the first stage's base. An adapter that was merged answers as the whole
    model. Raises DataError if there is no such checkpoint, a model is gone, or the run has not recorded its
    configuration.
    """
    trained = last_trained(folder)
    steps, tree = whole_steps(trained), run_record.read_config(trained)
    if not steps or (step is not None and step not in steps):
        stored_runs(folder)  # raises for a folder that is no run
        there = ", ".join(map(str, steps)) or "none; a run saves its first one after trainer.save_interval steps"
        of_step = "" if step is None else f" of step {step}"
        raise DataError(f"{trained} has no checkpoint{of_step}: there is {there}", key=str(folder))
    if not tree:
        raise DataError(f"{trained} has not recorded its configuration (monitor/config.yaml)", key=str(folder))
    load_plugins(tree.get("plugin_dir"))
    settings, system = ModelConfig(**tree["model"]), None
    explorer_input = value_at(tree, "buffer.explorer_input") or {}
    if tasksets := [*(explorer_input.get("tasksets") or ()), *(explorer_input.get("eval_tasksets") or ())]:
        taskset = TasksetConfig(**tasksets[0])
        sampling = {key: value for key, value in taskset.rollout_args if value is not None and key in SAMPLING}
        settings, system = settings.with_values(sampling), task_format(taskset).system_prompt
    root, shown_step = trained.parent.parent, step or max(steps)
    step_folder, overrides = JobLayout(trained).step(shown_step), value_at(tree, OVERRIDES) or {}
    converted = convert(step_folder, merge=is_complete(JobLayout(trained).huggingface(shown_step)))
    path, adapter = str(converted), None
    if converted.name == ADAPTER:
        path, adapter = base_of(read_config(converted), step_folder), converted
        merge = f"trinity convert --checkpoint-dir {step_folder} --merge --base-model-dir <its folder>"
        remedy = f"Make a whole model with `{merge}`"
        _refuse_missing(path, "the base of the run's adapter", remedy, "--base-model-dir")
    models = {f"step {shown_step}": ChatModel(path, settings, system, adapter, overrides if adapter else {})}
    if not base:
        return models
    first = next(run for run in runs_in(folder.resolve()) if run.is_dir())
    start = now_at(str(read_json(JobLayout(first).trainer_meta).get("model") or settings.model_path), root)
    _refuse_missing(start, "the model that the run began with", "With --no-base the run's model answers alone")
    return {"base": ChatModel(start, settings, system, overrides=overrides)} | models


def _refuse_missing(model: str, what: str, remedy: str, key: str = "model.model_path") -> None:
    """Raise DataError if a local model cannot be loaded."""
    if looks_local(model) and (fault := model_fault(Path(model))):
        raise DataError(f"{what}: {fault} {remedy}", key=key)


def chat(conversation: Conversation, lines: Iterable[str], say: Callable[[str], object]) -> None:
    """Answer each line with every model; `/new` begins a new conversation. Raises DataError if the
    first question cannot be answered; for a later one, prints the error."""
    width = max(map(len, conversation.models))
    for line in map(str.strip, lines):
        if line == NEW:
            conversation.turns.clear()
        elif line:
            try:
                answers = conversation.ask(line)
            except DataError as error:
                if not conversation.turns:
                    raise
                say(f"{error} ({NEW})")
                continue
            for name, answer in answers.items():
                say(f"{name:{width}}  " + answer.replace("\n", "\n" + " " * (width + 2)))
