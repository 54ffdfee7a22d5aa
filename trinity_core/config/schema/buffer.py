"""The `buffer` section: tasks to explore, experiences to train on, and how many of each a step takes."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field

from trinity_core.config.types import (
    DERIVED,
    EMPTY,
    Args,
    Count,
    Derived,
    Flag,
    Integer,
    Many,
    Named,
    NonNegative,
    Number,
    Paths,
    Positive,
    PositiveShare,
    Seconds,
    Section,
    Seed,
    Share,
    Steps,
    Tokens,
    Unit,
)


class FormatConfig(Section):
    """Columns of a data set. Tasks of `toolcall_workflow` default to those of Tool-N1's data sets: `conversations`,
    `raw_system`, `tools`, `answer`."""

    prompt_type: Literal["plaintext", "messages", "text"] = "plaintext"
    """`plaintext`: a prompt is one string; `messages`: a list of messages (`role`, `content`) or turns (`from`,
    `value`); `text`: no prompt, every token of a text carries loss (`cpt`, whose default it is)."""
    text_key: str = "text"
    """Column of the text (text). One that is longer than `model.max_model_len` is cut into pieces."""
    prompt_key: str = "prompt"
    """Column of the user's prompt (plaintext)."""
    input_key: str | None = None
    """Column of optional text after the prompt, separated by an empty line (plaintext). By default `input` if
    `prompt_key` is `instruction`, as in Alpaca's data sets."""
    response_key: str = "response"
    """Column of the response or reference answer (plaintext)."""
    system_prompt_key: str | None = None
    """Column of the system prompt."""
    system_prompt: str | None = None
    """System prompt for rows without their own."""
    messages_key: str = "messages"
    """Column of the message list (messages)."""
    tools_key: str | None = None
    """Column of the tools, a list of objects."""
    workflow_key: str | None = None
    """Column of a row's own workflow; a row without one has `default_workflow_type`."""
    reward_fn_key: str | None = None
    """Column of a row's own reward function; a row without one has `default_reward_fn_type`."""
    chosen_key: str = "chosen"
    """Column of the preferred answer (DPO)."""
    rejected_key: str = "rejected"
    """Column of the other answer (DPO)."""
    enable_concatenated_multi_turn: Flag = False
    """Train on a conversation of several turns as one sequence, with a loss on every answer (messages, SFT)."""
    chat_template: str | None = None
    """Chat template (Jinja text) for this data set; by default the model's."""


class RolloutArgs(Section):
    """Sampling of responses; omitted settings follow the `model` section."""

    temperature: Derived[NonNegative] = DERIVED
    """Sampling temperature; 0 is greedy. The trainer computes each row's log-probs at the row's own temperature."""
    top_p: Derived[PositiveShare] = DERIVED
    """Nucleus sampling: share of the probability mass to sample from."""
    top_k: Derived[Annotated[Integer, Ge(-1), Unit("tokens")]] = DERIVED
    """Number of most likely tokens to sample from; -1 means all."""
    repetition_penalty: Positive | None = None
    """Above 1, tokens that prompt or answer already hold become less likely; by default `model.repetition_penalty`."""
    structured_output: Args = EMPTY
    """What forces the answers into a form: one of `json` (a JSON schema), `regex`, `choice` (a list of texts) and
    `grammar` (EBNF). Forced tokens carry no loss; `guided_tokens` counts them. In training the temperature must be 1
    (or 0)."""
    max_tokens: Tokens | None = None
    """Maximum response length; by default `model.max_response_tokens`, and through the OpenAI API what fits the
    context."""


class TaskSelectorConfig(Section):
    """The order in which tasks are drawn from a task set."""

    selector_type: str = "sequential"
    """`sequential`: as stored; `shuffle`: a new permutation each epoch; `random`: drawn with replacement; `priority`:
    highest value of a column first; `offline_easy2hard`: by columns, highest (easiest) first; `difficulty_based`: near
    a target pass rate, as estimated during the run. Or a plugin's name."""
    seed: Seed | None = None
    """Seed of the order; by default the run's `seed`."""
    feature_keys: Many[str] = ()
    """Numeric columns used by `priority` (one), `offline_easy2hard` (any number) and `difficulty_based` (none, or the
    pass rates of a weak and a strong model)."""
    kwargs: Args = EMPTY
    """Arguments of the selector; for `difficulty_based`: `m`, `lamb`, `rho`, `target_reward`, `tau`, `do_sample`."""


class TasksetConfig(Section):
    """A data set of tasks."""

    name: Derived[str] = DERIVED
    """Name in metrics and logs; unique within a run."""
    storage_type: Literal["file", "queue", "sql"] = "file"
    """How the tasks are stored. `queue`: a table to which tasks can be added during the run."""
    path: Paths = ""
    """File or folder of jsonl, json, csv or parquet, a list of them, a hub name, or a database URL. For `queue` a
    SQLite file, by default `tasks.db` in the run's `buffer` folder."""
    subset_name: str | None = None
    """Subset of a hub data set; table of a database, by default `name`."""
    split: str = "train"
    """Split of the data set, or a slice (`train[:100]`)."""
    repeat_times: Derived[Count] = DERIVED
    """Rollouts per task; by default `algorithm.repeat_times`, for evaluation 1."""
    format: FormatConfig = Field(default_factory=FormatConfig)
    """Columns of the data set."""
    rollout_args: RolloutArgs = Field(default_factory=RolloutArgs)
    """Sampling of responses to these tasks."""
    default_workflow_type: Derived[str] = DERIVED
    """Workflow of these tasks; by default that of `explorer_input`, then `math_workflow`."""
    default_reward_fn_type: str | None = None
    """Reward function of these tasks; by default that of `explorer_input`, then the workflow's own."""
    workflow_args: Args = EMPTY
    """Arguments of the workflow."""
    reward_fn_args: Args = EMPTY
    """Arguments of the reward function."""
    task_selector: TaskSelectorConfig = Field(default_factory=TaskSelectorConfig)
    """Order of the tasks."""
    weight: NonNegative | None = None
    """Weight of this task set in each explore step, relative to other task sets; by default all tasks of all task sets
    are equally likely. Give it for all training task sets or for none."""
    weight_by_step: Named[NonNegative] = EMPTY
    """Weights at certain explore steps, `{1: 1.0, 200: 0.0}`, instead of `weight`; interpolated linearly."""

    @property
    def weight_points(self) -> dict[int, float] | None:
        """Explore step → weight; None if no weight is given."""
        if self.weight_by_step:
            return {int(step): weight for step, weight in self.weight_by_step.items()}
        return None if self.weight is None else {1: self.weight}


class ExplorerInputConfig(Section):
    """The tasks to explore and evaluate. After loading, `tasksets` holds all training tasks."""

    taskset: TasksetConfig | None = None
    """A single task set for training. On loading it becomes the only entry of `tasksets`."""
    tasksets: Many[TasksetConfig] = ()
    """Several task sets for training. Give this or `taskset`."""
    eval_tasksets: Many[TasksetConfig] = ()
    """Task sets for evaluation."""
    default_workflow_type: str | None = None
    """Workflow of task sets without their own."""
    default_reward_fn_type: str | None = None
    """Reward function of task sets without their own."""

    @property
    def training(self) -> tuple[TasksetConfig, ...]:
        """All training task sets: `taskset`, then `tasksets`."""
        return self.tasksets if self.taskset is None else (self.taskset, *self.tasksets)

    @property
    def all_tasksets(self) -> tuple[TasksetConfig, ...]:
        """The task sets for training, then those for evaluation."""
        return (*self.training, *self.eval_tasksets)


class ReplayBufferConfig(Section):
    """Training on experiences by priority, and repeatedly. For every kind of store."""

    enable: Flag = False
    """Draw experiences by priority; with `reuse_cooldown_time` repeatedly."""
    priority_fn: str = "linear_decay"
    """How the priority of a task's rollouts is computed, from their newest version and number of uses."""
    priority_fn_args: Args = EMPTY
    """Arguments of the priority function."""
    reuse_cooldown_time: Seconds | None = None
    """Time after which an experience may be used again; null means never."""


class EarlierRolloutsConfig(Section):
    """Which rollouts of an earlier run to learn from."""

    min_reward: Number | None = None
    """Minimum reward of an answer to imitate; null means the best answer to each task whose answers differ in
    reward."""
    min_gap: NonNegative = 0.0
    """Minimum difference between the rewards of a pair's answers, exclusive (`dpo`)."""


class HumanVerdictsConfig(Section):
    """Asking a person for verdicts on answers of an earlier run before the flow trains."""

    enable: Flag = False
    """Pause the flow and show answers. It learns only from the verdicts: answers kept or dropped, and better ones
    written (rollouts)."""
    tasks: Annotated[Count, Unit("tasks")] = 8
    """Number of tasks shown, spread over the earlier run."""
    answers: Annotated[Integer, Ge(2)] = 2
    """Answers shown per task: the best and the worst by reward, then others."""
    timeout: Seconds = 86400.0
    """How long the flow waits for the verdicts."""
    on_timeout: Literal["end", "continue"] = "end"
    """If verdicts do not arrive in time: `end` fails the run, `continue` chooses among the answers by reward, as
    without this section."""


class ExperienceBufferConfig(Section):
    """The trainer's input: the explorer's experiences, or a data set."""

    name: Derived[str] = DERIVED
    """Name of the buffer; unique within a run."""
    storage_type: Derived[Literal["queue", "sql", "file", "rollouts"]] = DERIVED
    """`queue` and `sql`: the experience store; `file`: a data set of jsonl, json, csv or parquet. For algorithms that
    learn from data sets (`sft`, `dpo`) and for auxiliary buffers, `sql` is a table of yours and `rollouts` an earlier
    run; both are only read. By default `file` for these, else `queue`. In mode `explore`, `file` also writes the
    experiences as JSON lines."""
    path: Paths | None = None
    """For a data set its files (a path or a list), the URL of its database, or the earlier run's folder or database; in
    mode `explore` with `file` the file to write, or its folder; else the store, `sqlite:///NAME.db` (or `NAME.db`) in
    the run's `buffer` folder, `sqlite:////ABSOLUTE.db` or `postgresql://…`. By default `sqlite:///explorer_output.db`.
    A queue's backup in a `.json` file is accepted without effect, because the store is on disk."""
    subset_name: str | None = None
    """Subset of a hub data set; table of a database, by default `name`; run, if an earlier run's database contains
    several."""
    split: str = "train"
    """Split of the data set (file, sql), or a slice (`train[:100]`)."""
    rollouts: EarlierRolloutsConfig = Field(default_factory=EarlierRolloutsConfig)
    """Which answers of an earlier run to learn from (rollouts)."""
    human_verdicts: HumanVerdictsConfig = Field(default_factory=HumanVerdictsConfig)
    """A person's verdicts on answers of an earlier run, instead of rewards (rollouts)."""
    format: FormatConfig = Field(default_factory=FormatConfig)
    """Columns of the data set."""
    share: Positive | None = None
    """Weight of this data set's rows in a batch relative to others, by default 1. With `sft` and `dpo` an auxiliary
    buffer is used only if it has a share."""
    held_out: Flag = False
    """Measure the loss of this data set every `explorer.eval_interval` steps instead of training on it (auxiliary
    buffers; `sft`, `dpo`)."""
    max_read_timeout: Seconds = 1800.0
    """How long the trainer waits for experiences before it continues with fewer (queue). If there are none at all, it
    waits up to 24 times as long while an explorer is active."""
    replay_buffer: ReplayBufferConfig = Field(default_factory=ReplayBufferConfig)
    """Training on experiences by priority, and repeatedly."""


class TrainerInputConfig(Section):
    """What the trainer reads."""

    experience_buffer: ExperienceBufferConfig = Field(default_factory=ExperienceBufferConfig)
    """The explorer's output and the trainer's input."""
    auxiliary_buffers: Named[ExperienceBufferConfig] = EMPTY
    """Further data sets by name: the expert data of `mix` and `mix_chord`, or more rows for `sft` and `dpo`."""


class BufferConfig(Section):
    """Batch sizes, length of training, and data sets."""

    batch_size: Derived[Annotated[Count, Unit("tasks")]] = DERIVED
    """Tasks per explore step (not multiplied by `algorithm.repeat_times`). By default `train_batch_size /
    algorithm.repeat_times`, or 1 if neither is given."""
    train_batch_size: Derived[Annotated[Count, Unit("experiences")]] = DERIVED
    """Experiences per train step; by default `batch_size * algorithm.repeat_times`, plus the expert data with `mix`. In
    a synchronous run an experience stands for a rollout: a train step takes one whole explore step, however many
    sequences each rollout consists of."""
    total_epochs: Annotated[Count, Unit("epochs")] = 1
    """Passes over the training tasks. Ignored if `total_steps` is given."""
    total_steps: Steps | None = None
    """Number of train steps; null means as many as the experiences of `total_epochs` fill."""
    max_rejected_share: Share = 0.5
    """Maximum share of a data set's rows that may be rejected as unusable: missing columns, parse errors, too long.
    Above it the run does not start."""
    explorer_input: ExplorerInputConfig = Field(default_factory=ExplorerInputConfig)
    """Tasks."""
    trainer_input: TrainerInputConfig = Field(default_factory=TrainerInputConfig)
    """Experiences."""
