"""The `buffer` section: tasks that are explored, experiences that are trained on, and how many of each a step takes."""

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
    """Which columns of a data set hold what. Tasks of `toolcall_workflow` have those of Tool-N1's data sets by default:
    `conversations`, `raw_system`, `tools`, `answer`."""

    prompt_type: Literal["plaintext", "messages"] = "plaintext"
    """Whether a prompt is one string or a list of messages (`role`, `content`) or turns (`from`, `value`)."""
    prompt_key: str = "prompt"
    """Column of the user's prompt (plaintext)."""
    input_key: str | None = None
    """Column of text that follows the prompt behind an empty line, where a row has some (plaintext). By default `input`
    where `prompt_key` is `instruction`, as in Alpaca's data sets."""
    response_key: str = "response"
    """Column of the response or reference answer (plaintext)."""
    system_prompt_key: str | None = None
    """Column of the system prompt."""
    system_prompt: str | None = None
    """System prompt of rows that have none of their own."""
    messages_key: str = "messages"
    """Column of the message list (messages)."""
    tools_key: str | None = None
    """Column of the tools, a list of objects."""
    chosen_key: str = "chosen"
    """Column of the preferred answer (DPO)."""
    rejected_key: str = "rejected"
    """Column of the other answer (DPO)."""
    enable_concatenated_multi_turn: Flag = False
    """One sequence for a conversation of several turns, with loss on every answer (messages, SFT)."""
    chat_template: str | None = None
    """Chat template (Jinja text) of this data set; by default the model's."""


class RolloutArgs(Section):
    """How responses are sampled; what is left out follows the `model` section."""

    temperature: Derived[NonNegative] = DERIVED
    """Sampling temperature; 0 is greedy. The trainer takes the log-probs of each row at the row's own temperature."""
    top_p: Derived[PositiveShare] = DERIVED
    """Share of the probability mass that is sampled from."""
    top_k: Derived[Annotated[Integer, Ge(-1), Unit("tokens")]] = DERIVED
    """Most likely tokens that are sampled from; -1 means all."""
    max_tokens: Tokens | None = None
    """Longest response; by default `model.max_response_tokens`, and through the OpenAI API what the context holds."""


class TaskSelectorConfig(Section):
    """The order in which tasks are taken from a task set."""

    selector_type: str = "sequential"
    """`sequential`: as stored; `shuffle`: a new permutation each epoch; `random`: drawn with replacement; `priority`:
    the highest value of a column first; `offline_easy2hard`: by columns, the highest (easiest) first;
    `difficulty_based`: near a target pass rate, as estimated during the run. Or a plugin's name."""
    seed: Seed | None = None
    """Seed of the order; by default the run's `seed`."""
    feature_keys: Many[str] = ()
    """Columns of numbers by which `priority` (one), `offline_easy2hard` (any number) and `difficulty_based` (none, or
    the pass rates of a weak and a strong model) choose."""
    kwargs: Args = EMPTY
    """Arguments of the selector; of `difficulty_based`: `m`, `lamb`, `rho`, `target_reward`, `tau`, `do_sample`."""


class TasksetConfig(Section):
    """A data set of tasks."""

    name: Derived[str] = DERIVED
    """Name in metrics and logs; unique within a run."""
    storage_type: Literal["file", "queue", "sql"] = "file"
    """How the tasks are stored. `queue`: in a table to which tasks are added during the run."""
    path: Paths = ""
    """File or folder of jsonl, json, csv or parquet, a list of such, hub name, or database URL. For `queue` a SQLite
    file, by default `tasks.db` in the run's `buffer` folder."""
    subset_name: str | None = None
    """Subset of a hub data set; table of a database, by default `name`."""
    split: str = "train"
    """Split of the data set."""
    repeat_times: Derived[Count] = DERIVED
    """Rollouts of one task; by default `algorithm.repeat_times`, for evaluation 1."""
    format: FormatConfig = Field(default_factory=FormatConfig)
    """Columns of the data set."""
    rollout_args: RolloutArgs = Field(default_factory=RolloutArgs)
    """Sampling of responses to these tasks."""
    default_workflow_type: Derived[str] = DERIVED
    """Workflow of these tasks; by default `explorer_input`'s, then `buffer`'s, then `math_workflow`."""
    default_reward_fn_type: str | None = None
    """Reward of these tasks; by default `explorer_input`'s, then `buffer`'s, then the workflow's own."""
    workflow_args: Args = EMPTY
    """Arguments of the workflow."""
    reward_fn_args: Args = EMPTY
    """Arguments of the reward function."""
    task_selector: TaskSelectorConfig = Field(default_factory=TaskSelectorConfig)
    """Order of the tasks."""
    data_selector: TaskSelectorConfig | None = None
    """Another spelling of `task_selector`. Loading makes it that."""
    weight: NonNegative | None = None
    """This task set's share of each explore step, relative to the weights of the others; by default all tasks of all
    task sets are equally likely. Given for all training task sets or for none."""
    weight_by_step: Named[NonNegative] = EMPTY
    """The weight at some explore steps, `{1: 1.0, 200: 0.0}`, in place of `weight`; linear between them."""

    @property
    def weight_points(self) -> dict[int, float] | None:
        """Explore step -> weight; None if no weight is given."""
        if self.weight_by_step:
            return {int(step): weight for step, weight in self.weight_by_step.items()}
        return None if self.weight is None else {1: self.weight}


class ExplorerInputConfig(Section):
    """The tasks that are explored and evaluated. After loading, `tasksets` holds all training tasks."""

    taskset: TasksetConfig | None = None
    """The training tasks: one task set. Loading makes it the only entry of `tasksets`."""
    tasksets: Many[TasksetConfig] = ()
    """The training tasks: several task sets. Give this or `taskset`."""
    eval_tasksets: Many[TasksetConfig] = ()
    """Task sets for evaluation."""
    default_workflow_type: str | None = None
    """Workflow of task sets that name none."""
    default_reward_fn_type: str | None = None
    """Reward of task sets that name none."""

    @property
    def training(self) -> tuple[TasksetConfig, ...]:
        """All training task sets: `taskset`, then `tasksets`."""
        return self.tasksets if self.taskset is None else (self.taskset, *self.tasksets)


class ReplayBufferConfig(Section):
    """Which experiences are trained on first, and again. On every store."""

    enable: Flag = False
    """Experiences of higher priority first; with `reuse_cooldown_time` again and again."""
    priority_fn: str = "linear_decay"
    """The priority of the rollouts of a task: newest version and uses count."""
    priority_fn_args: Args = EMPTY
    """Arguments of the priority function."""
    reuse_cooldown_time: Seconds | None = None
    """Time after which an experience may be used again; null means never."""


class EarlierRolloutsConfig(Section):
    """Which rollouts of an earlier run are learned from."""

    min_reward: Number | None = None
    """Lowest reward of an answer to imitate; null means the best answer to each task whose answers differ in reward."""
    min_gap: NonNegative = 0.0
    """Rewards of the two answers of a pair differ by more than this (`dpo`)."""


class HumanVerdictsConfig(Section):
    """Asking a person about answers of an earlier run before the flow learns from them."""

    enable: Flag = False
    """The flow pauses and shows answers. It learns from the verdicts alone: answers kept, dropped, better ones written
    (rollouts)."""
    tasks: Annotated[Count, Unit("tasks")] = 8
    """Tasks that are shown, spread over the earlier run."""
    answers: Annotated[Integer, Ge(2)] = 2
    """Answers to a task that are shown: the best and the worst by reward, then others."""
    timeout: Seconds = 86400.0
    """How long the flow waits for the verdicts."""
    on_timeout: Literal["end", "continue"] = "end"
    """Without verdicts in time: `end` fails the run, `continue` lets rewards choose among the answers, as without this
    section."""


class ExperienceBufferConfig(Section):
    """What the trainer reads: the explorer's experiences, or a data set."""

    name: Derived[str] = DERIVED
    """Name of the buffer; unique within a run."""
    storage_type: Derived[Literal["queue", "sql", "file", "rollouts"]] = DERIVED
    """`queue` and `sql`: the experience store; `file`: a data set of jsonl, json, csv or parquet. For algorithms that
    learn from data sets (`sft`, `dpo`) and for auxiliary buffers `sql` is a table of yours and `rollouts` an earlier
    run, which are only read. By default `file` for these, else `queue`. In mode `explore` `file` writes the experiences
    as JSON lines too."""
    path: Paths | None = None
    """For a data set its files (a path or a list), the URL of its database, or the earlier run's folder or database; in
    mode `explore` with `file` the file that is written, or its folder; else the store, `sqlite:///NAME.db` (or
    `NAME.db`) within the run's `buffer` folder, `sqlite:////ABSOLUTE.db` or `postgresql://…`. By default
    `sqlite:///explorer_output.db`. A queue's backup in a `.json` file is accepted without effect: the store is on disk
    anyway."""
    subset_name: str | None = None
    """Subset of a hub data set; table of a database, by default `name`; run, where an earlier run's database has
    several."""
    split: str = "train"
    """Split of the data set (file)."""
    rollouts: EarlierRolloutsConfig = Field(default_factory=EarlierRolloutsConfig)
    """Which answers of an earlier run are learned from (rollouts)."""
    human_verdicts: HumanVerdictsConfig = Field(default_factory=HumanVerdictsConfig)
    """A person's verdicts on answers of an earlier run, in place of rewards (rollouts)."""
    format: FormatConfig = Field(default_factory=FormatConfig)
    """Columns of the data set."""
    share: Positive | None = None
    """Weight of this data set's rows in a batch relative to others, by default 1. With `sft` and `dpo` an auxiliary
    buffer takes part only if it has one."""
    max_read_timeout: Seconds = 1800.0
    """How long the trainer waits for experiences before it continues with fewer (queue). Without any, it waits up to 24
    times as long for an explorer that is seen at work."""
    use_priority_queue: Flag = False
    """Experiences of higher priority first; `replay_buffer` without its other keys."""
    reuse_cooldown_time: Seconds | None = None
    """Time after which an experience may be used again; null means never (priority queue)."""
    replay_buffer: ReplayBufferConfig = Field(default_factory=ReplayBufferConfig)
    """Training on experiences by priority, and again."""


class TrainerInputConfig(Section):
    """What the trainer reads."""

    experience_buffer: ExperienceBufferConfig = Field(default_factory=ExperienceBufferConfig)
    """The explorer's output and the trainer's input."""
    auxiliary_buffers: Named[ExperienceBufferConfig] = EMPTY
    """Further data sets by name: the expert data of `mix` and `mix_chord`, or more rows for `sft` and `dpo`."""


class BufferConfig(Section):
    """Batch sizes, length of training, and data sets."""

    batch_size: Derived[Annotated[Count, Unit("tasks")]] = DERIVED
    """Tasks of one explore step (not multiplied by `algorithm.repeat_times`). By default
    `train_batch_size / algorithm.repeat_times`, and 1 where neither is given."""
    train_batch_size: Derived[Annotated[Count, Unit("experiences")]] = DERIVED
    """Experiences of one gradient step; by default `batch_size * algorithm.repeat_times`, and with `mix` the
    expert data on top of it. In a synchronous run an experience stands for a rollout: a train step takes one whole
    explore step, whatever the number of sequences that each rollout became."""
    total_epochs: Annotated[Count, Unit("epochs")] = 1
    """Passes over the training tasks. Ignored where `total_steps` is given."""
    total_steps: Steps | None = None
    """Train steps; null means as many as the experiences of `total_epochs` fill."""
    max_rejected_share: Share = 0.5
    """Largest share of a data set's rows that may be rejected because they cannot be used: they lack a column, do not
    parse, or are too long. A run does not begin with more of them."""
    explorer_input: ExplorerInputConfig = Field(default_factory=ExplorerInputConfig)
    """Tasks."""
    trainer_input: TrainerInputConfig = Field(default_factory=TrainerInputConfig)
    """Experiences."""
    default_workflow_type: str | None = None
    """Workflow of task sets that name none."""
    default_reward_fn_type: str | None = None
    """Reward of task sets that name none."""
