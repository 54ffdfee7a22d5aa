"""Everything that a configuration names is found in a registry, with the arguments of its own signature."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import pytest
from annotated_types import Ge, Le
from pydantic import BaseModel, model_validator
from pydantic.fields import FieldInfo
from raising import raising

from trinity_core.algorithms import POLICY_LOSSES, KLCoefficient, policy_loss
from trinity_core.algorithms.entropy import EntropyCoefficient
from trinity_core.base.errors import InputError, TrinityError
from trinity_core.base.plugins import load_plugins
from trinity_core.base.registry import HOMES, Registry, registry_of
from trinity_core.base.signatures import ArgumentsOf, Choices, arguments_model
from trinity_core.config import ConfigError, config_from_dict
from trinity_core.config.arguments import fitting
from trinity_core.config.findings import Report

if TYPE_CHECKING:
    from decimal import Decimal

ROOT = Path(__file__).parents[1]
PARTS = [(key, name) for key in HOMES for name in registry_of(key) if key != "algorithm.algorithm_type"]
TENSORS = ("Tensor", "GroupIds")
"""Annotations of what the trainer gives to a part."""
GIVEN = {
    "is_expert",
    "step",
    "group_ids",
    "states",
    "prompt",
    "response",
    "truth",
    "response_tokens",
    "task",
    "experiences",
    "data_juicer_server",
    "plugin_dir",
    "info",
    "items",
    "models",
    "numbers",
    "source",
}


def parameters(part: Any, key: str) -> dict[str, Any]:
    """Name → default of what a configuration may give to a part, from signatures alone."""
    functions = [getattr(part, "function", part)]
    functions += [KLCoefficient] if "kl_" in key else []
    functions = [EntropyCoefficient] if "entropy" in key else functions
    by_name: dict[str, Any] = {}
    for function in functions:
        for parameter in inspect.signature(function).parameters.values():
            tensor = isinstance(parameter.annotation, str) and parameter.annotation.startswith(TENSORS)
            named = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if named and not tensor and parameter.name not in GIVEN and "checkpoint_root_dir" not in parameter.name:
                by_name[parameter.name] = parameter.default
    return by_name


def default_of(field: FieldInfo) -> Any:
    """As a signature has it."""
    return inspect.Parameter.empty if field.is_required() else field.default


@pytest.mark.parametrize(("key", "name"), PARTS, ids=str)
def test_model_has_the_parameters_of_the_part(key: str, name: str) -> None:
    registry = registry_of(key)
    model = registry.arguments(registry[name], name)
    assert model is not None
    if key != "default_workflow_type":  # a workflow says by a model of its own what it takes
        fields = {field: default_of(info) for field, info in model.model_fields.items()}
        assert fields == parameters(registry[name], key)


def test_checking_a_configuration_imports_no_torch() -> None:
    program = (
        "import sys; from trinity_core.config import load_config; load_config('configs/gsm8k/gsm8k.yaml');"
        "from trinity_core.base.registry import HOMES, registry_of;"
        "[r.arguments(r[name], name) for r in map(registry_of, HOMES) for name in r];"
        "print([name for name in ('torch', 'ray', 'vllm', 'mlflow', 'wandb', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_one_decorator_makes_a_loss_valid_in_yaml() -> None:
    tree = {"mode": "train", "model": {"model_path": "m", "max_model_len": 8}}
    chosen = tree | {"algorithm": {"policy_loss_fn": "cubed", "policy_loss_fn_args": {"power": "3"}}}
    with raising(ConfigError, key="algorithm.policy_loss_fn"):
        config_from_dict(chosen)

    @policy_loss("cubed")
    def cubed(logprobs, mask, *, advantages, power: int = 2):  # type: ignore[no-untyped-def]
        return -advantages * logprobs**power, {}

    try:
        assert config_from_dict(chosen).algorithm.policy_loss_fn_args == {"power": 3}
        with raising(ConfigError, key="algorithm.policy_loss_fn_args.pover"):
            config_from_dict(chosen, ["algorithm.policy_loss_fn_args={pover: 2}"])
    finally:
        del POLICY_LOSSES["cubed"]


def test_taken_names_are_refused_and_reimports_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Registry[Any] = Registry("thing")
    registry.register("one")(parameters)
    with raising(InputError, key="one"):
        registry.register("one")(test_checking_a_configuration_imports_no_torch)
    with raising(InputError, key="one"):
        registry.register("one")(parameters)
    monkeypatch.setattr(sys, "path", list(sys.path))
    plugin = tmp_path / "fails_at_its_end.py"
    head = "from trinity_core.workflows import REWARD_FNS\n@REWARD_FNS.register('late')\ndef late(**args): return 1.0\n"
    try:
        for _ in range(2):
            plugin.write_text(f"{head}raise RuntimeError('no licence')\n")
            with raising(TrinityError, key=str(plugin)):
                load_plugins(tmp_path)
        plugin.write_text(head)
        assert load_plugins(tmp_path) == ["fails_at_its_end"]
        (tmp_path / "twice.py").write_text(
            head.replace("late", "twice") + head.partition("\n")[2].replace("late", "twice")
        )
        with raising(TrinityError, key=str(tmp_path / "twice.py")):
            load_plugins(tmp_path)
    finally:
        for name in ("late", "twice"):
            registry_of("default_reward_fn_type").pop(name, None)
        sys.modules.pop("fails_at_its_end", None)


def test_parts_of_the_wrong_kind_are_refused() -> None:
    with raising(InputError, key="odd"):
        POLICY_LOSSES.arguments(cast(Any, parameters), "odd")
    with pytest.raises(InputError):
        POLICY_LOSSES.register(cast(Any, parameters))


def scorer(
    response: str,
    count: int,
    share: Annotated[float, Ge(0), Le(1)] = 0.5,
    kind: Literal["a", "b"] = "a",
    words: list[str] | None = None,
    limit: float = None,  # type: ignore[assignment]  # noqa: RUF013
    amount: Decimal | None = None,
    odd: "not a type" = 1,  # type: ignore  # noqa: F722
    inner: Annotated[Mapping[str, Any] | None, ArgumentsOf(EntropyCoefficient)] = None,
    name: Annotated[object, Choices(lambda: ["x", "y"])] = None,
    **_: Any,
) -> None: ...


SCORERS: Registry[Any] = Registry("scorer", inputs=("response",))


def fitted(part: Any, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    report = Report()
    values = fitting(SCORERS, part, "scorer", given, "args", report)
    return values, [(problem.key, problem.code) for problem in report.problems]


@pytest.mark.parametrize(
    ("arguments", "key", "code"),
    [
        ({"cuont": 1}, "cuont", "unknown-argument"),
        ({}, "count", "missing"),
        ({"count": "many"}, "count", "wrong-type"),
        ({"count": 1, "share": 2}, "share", "out-of-range"),
        ({"count": 1, "kind": "aa"}, "kind", "unknown-choice"),
        ({"count": 1, "words": "x"}, "words", "wrong-type"),
        ({"count": 1, "limit": "x"}, "limit", "wrong-type"),
        ({"count": 1, "inner": 3}, "inner", "wrong-type"),
        ({"count": 1, "inner": {"entropy_coeff": 3}}, "inner.entropy_coeff", "unknown-argument"),
        ({"count": 1, "name": "z"}, "name", "unknown-choice"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_reported(arguments: dict[str, Any], key: str, code: str) -> None:
    assert fitted(scorer, arguments) == (arguments, [(f"args.{key}", code)])


def test_fitting_arguments_get_their_types() -> None:
    arguments = {"count": "3", "share": 1, "limit": None, "odd": [1], "amount": "any", "inner": {"entropy_coef": "0.5"}}
    values, problems = fitted(scorer, arguments)
    assert not problems
    assert values == {**arguments, "count": 3, "share": 1.0, "inner": {"entropy_coef": 0.5}}
    assert type(values["share"]) is float


def test_functions_may_take_anything_or_have_no_signature() -> None:
    def anything(response: str, **args: Any) -> None: ...

    assert fitted(anything, {"a": 1}) == ({"a": 1}, [])
    assert fitted(max, {"key": 1}) == ({"key": 1}, [])
    assert arguments_model("max", [max]) is None


def test_a_part_may_bring_a_model() -> None:
    class Limits(BaseModel):
        low: int = 0
        high: int | str = 1

        @model_validator(mode="after")
        def ordered(self) -> Limits:
            if str(self.low) > str(self.high):
                raise ValueError("low must not be above high")
            return self

    registry: Registry[type[BaseModel]] = Registry("limits")
    report = Report()
    assert fitting(registry, Limits, "limits", {"low": "1", "high": 3}, "args", report) == {"low": 1, "high": 3}
    assert not report.problems
    fitting(registry, Limits, "limits", {"low": 2}, "args", report)
    (problem,) = report.problems
    assert (problem.key, problem.code) == ("args", "invalid")


@pytest.mark.parametrize(("kind", "known"), [("ENVIRONMENTS", "taxi"), ("TOOLS", "calculate")])
def test_an_unknown_name_is_answered_with_the_recipe_that_may_bring_it(
    kind: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = getattr(importlib.import_module("trinity_core.workflows"), kind)
    if known in registry:  # a test file has imported the recipe's plugin
        monkeypatch.delitem(registry, known)
    with pytest.raises(InputError) as failure:
        registry.resolve(known)
    folder = str(failure.value).partition("plugin_dir: ")[2].split(".")[0]
    assert any(f'register("{known}")' in file.read_text() for file in (ROOT / folder).glob("*.py"))
