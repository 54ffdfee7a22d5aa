"""Converts a checkpoint's shards to a Hugging Face folder (`actor/huggingface`) that transformers loads directly.

The shard format (our trainer's, FSDP's, Megatron's) is detected. Only the policy is converted, not the critic.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.base.errors import DataError
from trinity_core.base.files import (
    clear_errors,
    from_record,
    remove_tree,
    sync_file,
    temporary_sibling,
    when_room,
    write_atomically,
    write_json,
)
from trinity_core.base.layout import ABANDONED, ADAPTER, MANIFEST, stages_of, step_of
from trinity_core.base.lazy import OWN_ATTENTION, require_matching_builds
from trinity_core.data.tokenizer import GENERATION, load_tokenizer, write_stop_tokens
from trinity_core.exchange.checkpoints import adapters
from trinity_core.exchange.checkpoints.beginning import STATE, Beginning
from trinity_core.exchange.checkpoints.commit import damage
from trinity_core.exchange.checkpoints.hub_names import HubNames, Tensors
from trinity_core.exchange.checkpoints.shards import (
    find_megatron,
    from_megatron,
    load_shard,
    merge_shards,
    read_megatron,
    shard_files,
)
from trinity_core.exchange.model_fault import model_fault
from trinity_core.exchange.weights_digest import model_folder, weight_files

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
LARGEST_FILE = "5GB"
"""Larger models are split into files of this size with an index, as transformers does."""
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*",
    "additional_chat_templates/*", "*.model", "*.tiktoken", "*.py",
)  # fmt: skip
"""A model's files of its tokenizer and its own code, which are copied along with the weights."""
log = logging.getLogger(__name__)


def convert_all(checkpoint_dir: Path, base_model_dir: Path | None = None, merge: bool = False) -> list[Path]:
    """Convert the checkpoint that contains `checkpoint_dir`, or else every checkpoint below it; see `convert`.

    Returns the folders, including those converted before. Abandoned checkpoints are skipped. Raises DataError if there
    is no checkpoint or, after converting all others, if one cannot be converted.
    """
    steps = find_steps(Path(checkpoint_dir))
    if len(steps) == 1:
        return [convert(steps[0], base_model_dir, merge)]
    folders, failures = [], []
    for step in steps:
        if (step / ABANDONED).exists():
            log.warning("%s is left out: its run went back to an earlier checkpoint", step)
        elif not (_has_model(step / "actor") or is_complete(step / "actor" / "huggingface")):
            log.info("%s holds no shards of the policy; it is skipped", step)
        else:
            try:
                folders.append(convert(step, base_model_dir, merge))
            except DataError as error:
                log.error("%s", error)
                failures.append(error)
    if failures and folders:
        raise DataError(f"{len(failures)} of {len(steps)} checkpoints are not converted, all others are: {failures[0]}")
    if failures:
        raise failures[0]
    if not folders:
        none = f"none of the {len(steps)} checkpoints in {checkpoint_dir} is whole and holds the policy"
        raise DataError(none, key=str(checkpoint_dir))
    return folders


def find_steps(path: Path) -> list[Path]:
    """Return the `global_step_N` that `path` is or is inside of; otherwise all below it, or below the stages of the
    pipeline in it, in order of step."""
    path = path.resolve()
    for folder in (path, *path.parents):
        if step_of(folder) is not None and folder.is_dir():
            return [folder]
    if not path.is_dir():
        raise DataError(f"{path} does not exist; give a run's folder or one of its global_step_<number>", key=str(path))
    folders = [
        folder for root in (path, *stages_of(path).values()) for folder in root.rglob("global_step_*")
        if step_of(folder) is not None and folder.is_dir()
        and not any(part.startswith(".") for part in folder.relative_to(root).parts)
    ]  # fmt: skip
    if not folders:
        raise DataError(f"there is no global_step_<number> folder in {path}", key=str(path))
    return sorted(folders, key=lambda folder: (folder.parent, step_of(folder)))


def convert(step_folder: Path, base_model_dir: Path | None = None, merge: bool = False) -> Path:
    """Convert the checkpoint `step_folder` unless this was done before; return its `actor/huggingface`.

    For a LoRA adapter the result is `actor/lora_adapter`, in peft's format. With `merge` it is merged into its base
    model, in the wider dtype of the two, and the whole model is in `actor/huggingface`.

    `config.json` and tokenizer come from `base_model_dir` if the checkpoint lacks them; `generation_config.json` names
    the tokens with which the chat template ends an answer. Tensors get their names on the hub. Data types are kept; a
    head tied to the embeddings is not stored twice. Raises DataError if the checkpoint is damaged, or is removed
    meanwhile.
    """
    actor = step_folder / "actor"
    target = actor / "huggingface"
    has_adapter = (actor / ADAPTER / adapters.CONFIG).is_file()
    if has_adapter and not merge:
        target = actor / ADAPTER
    if (target / adapters.WEIGHTS).is_file() or is_complete(target):
        log.info("%s is converted already", target)
        return target
    is_ours = (step_folder / MANIFEST).exists()  # other systems' checkpoints have none
    if is_ours and (wrong := damage(step_folder)):
        raise DataError(f"{step_folder} is damaged: {wrong}. Convert another checkpoint")
    if target.name == ADAPTER:
        settings, matrices = adapters.read_config(target), _adapter(actor)
        _refuse_removed(step_folder, is_ours)
        adapters.write_adapter(matrices, settings, target)
        return target
    config = _config(target, base_model_dir)
    model = _without_data(config, actor)
    names = HubNames() if model is None else HubNames.of_model(model)
    if has_adapter:
        tensors, value_of = _merged(step_folder, base_model_dir, names)
    else:
        tensors, value_of = _tensors(actor, config)
    tensors = _untie(tensors, value_of, config, actor)
    tensors, value_of = names.converted(tensors, value_of)
    if model is not None:
        check_names(tensors, model, names, actor)
    _refuse_removed(step_folder, is_ours)
    temporary = temporary_sibling(target)
    with clear_errors("converting to", target):
        when_room(temporary.mkdir, temporary)
        try:
            if target.is_dir():
                shutil.copytree(target, temporary, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
            if base_model_dir is not None:
                copy_companions(base_model_dir, temporary, (*COMPANIONS, GENERATION))
            _stop_tokens(temporary)
            write_json(temporary / "config.json", with_dtype(config, tensors))
            write_model(tensors, value_of, temporary)
            _refuse_removed(step_folder, is_ours)
            _move_into(temporary, target)
        finally:
            remove_tree(temporary)
    return target


def _refuse_removed(step_folder: Path, is_ours: bool) -> None:
    """Raise DataError if the trainer has removed the checkpoint since the conversion began."""
    if not (step_folder / (MANIFEST if is_ours else "actor")).exists():
        raise DataError(
            f"{step_folder} was removed while it was converted: the run keeps trainer.max_checkpoints_to_keep of them. "
            "Convert a newer one",
            key=str(step_folder),
        )


def _move_into(temporary: Path, target: Path) -> None:
    """Move a converted model to its place; the files that make it complete go last."""
    target.mkdir(exist_ok=True)
    for path in sorted(temporary.iterdir(), key=lambda path: (path.name == INDEX, path.suffix == ".safetensors")):
        if path.is_dir():
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)
        else:
            path.replace(target / path.name)
    sync_file(target)


def is_converted(step_folder: Path) -> bool:
    """True if `convert` has nothing left to do for this checkpoint."""
    actor = step_folder / "actor"
    return (actor / ADAPTER / adapters.WEIGHTS).is_file() or is_complete(actor / "huggingface")


def is_complete(folder: Path) -> bool:
    """True if `folder` holds a loadable model: configuration and all weight files, as long as their headers say."""
    return not model_fault(folder, speaks=False)


def _has_model(actor: Path) -> bool:
    return bool(list(actor.glob("model_world_size_*_rank_*.pt"))) or find_megatron(actor) is not None


def _config(target: Path, base: Path | None) -> dict[str, Any]:
    for folder in (target, base):
        if folder is not None and (folder / "config.json").is_file():
            config: dict[str, Any] = json.loads((folder / "config.json").read_text())
            return config
    hint = f"; {base} holds none either" if base is not None else ""
    raise DataError(
        f"{target} has no config.json: name the base model's folder with --base-model-dir{hint}", key="--base-model-dir"
    )


def _tensors(actor: Path, config: dict[str, Any]) -> tuple[Tensors, Callable[[str], torch.Tensor]]:
    """Return the model's tensors, possibly without data, and a function that returns the data of one."""
    if files := shard_files(actor):
        like, value_of = merge_shards(files)
        names = {_plain_name(name): name for name in like}
        return {plain: like[name] for plain, name in names.items()}, lambda plain: value_of(names[plain])
    folder = find_megatron(actor)
    if folder is None:
        kinds = "model_world_size_*_rank_*.pt or a Megatron checkpoint"
        raise DataError(f"{actor} holds no model shards ({kinds})", key=str(actor))
    tensors = from_megatron(read_megatron(folder), config)
    return tensors, tensors.__getitem__


def _adapter(actor: Path) -> Tensors:
    if not (files := shard_files(actor)):
        raise DataError(f"{actor} holds no shards of its adapter (model_world_size_*_rank_*.pt)", key=str(actor))
    like, value_of = merge_shards(files)
    return {name: value_of(name) for name in like}


def _merged(
    step_folder: Path, base_model_dir: Path | None, names: HubNames
) -> tuple[Tensors, Callable[[str], torch.Tensor]]:
    """Return a checkpoint's base model with the adapter merged: tensors without data by hub name, and a function that
    returns the data.

    The whole model is never in memory: its files are mapped, and a tensor is merged on request. Raises DataError if the
    base has changed.
    """
    import torch

    actor = step_folder / "actor"
    config = adapters.read_config(actor / ADAPTER)
    adapter = _adapter(actor)
    base = str(base_model_dir or adapters.base_of(config, step_folder))
    state = step_folder / STATE
    began = json.loads(state.read_text())["began"]
    if began and from_record(Beginning, began, state).differs(Beginning.of(base)):
        raise DataError(
            f"the adapter in {actor} belongs to {began['model']} as it was when the run began, and {base} is another "
            "model or has been rewritten since; name the folder of its base with --base-model-dir"
        )
    folder = model_folder(base)
    files = weight_files(folder) if folder is not None else []
    if not files:
        raise DataError(
            f"{base} holds no weights into which the adapter in {actor} could be merged; name the folder of its base "
            "with --base-model-dir",
            key="--base-model-dir",
        )
    stored = dict(stored_tensors(files))
    tensors, value_of = names.converted(stored, stored.__getitem__)
    adapter = {_on_hub(name, names): tensor for name, tensor in adapter.items()}
    adapters.require_matrices(adapter, tensors)
    dtype, scale = next(iter(adapter.values())).dtype, adapters.scaling(config)
    dtypes = {
        name: torch.promote_types(tensor.dtype, dtype) if tensor.is_floating_point() else tensor.dtype
        for name, tensor in tensors.items()
    }
    like = {name: torch.empty_like(t, dtype=dtypes[name], device="meta") for name, t in tensors.items()}
    return like, lambda name: adapters.merged_tensor(name, value_of(name).to(dtypes[name]), adapter, scale)


def _on_hub(name: str, names: HubNames) -> str:
    """Return an adapter tensor's name with its module's hub name."""
    module, end = name[: -len(adapters.A)], name[-len(adapters.A) :]
    return names.name(f"{module}.weight").removesuffix(".weight") + end


def stored_tensors(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in files:
        if file.suffix != ".safetensors":
            yield from load_shard(file).items()
            continue
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, opened.get_tensor(name)


def _plain_name(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def _untie(tensors: Tensors, value_of: Callable[[str], torch.Tensor], config: dict[str, Any], actor: Path) -> Tensors:
    """Drop a tied head. Raises DataError if head and embeddings differ in the checkpoint."""
    import torch

    if not config.get("tie_word_embeddings") or HEAD not in tensors or EMBEDDINGS not in tensors:
        return tensors
    if not torch.equal(value_of(HEAD), value_of(EMBEDDINGS)):
        raise DataError(f"{actor}: config.json ties head and embeddings, but the checkpoint holds different ones")
    return {name: tensor for name, tensor in tensors.items() if name != HEAD}


def _without_data(config: dict[str, Any], actor: Path) -> Any:
    """Return the model that `config` describes, without data; None with a warning if transformers lacks the
    architecture."""
    import torch

    require_matching_builds()
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        settings = AutoConfig.for_model(**config)
        # Without `dtype`, config.json's dtype would become the default of all threads, including a train step's.
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(settings, dtype=torch.get_default_dtype(), **OWN_ATTENTION)
    except (ValueError, KeyError) as error:
        fault = str(error).split(". ")[0]  # transformers goes on to list all the types it knows
        log.warning("the names of the tensors in %s are neither checked nor converted: %s", actor, fault)
        return None


def check_names(tensors: Tensors, model: Any, names: HubNames, actor: Path) -> None:
    """Raise DataError if the hub names in `tensors` do not match the architecture."""
    stored = model.state_dict()  # lists tied weights under both names; one is required
    required = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in stored}
    expected = {name: tuple(tensor.shape) for name, tensor in names.tensors(required.items())}
    missing = sorted(set(expected) - set(tensors))
    wrong = sorted(name for name in set(expected) & set(tensors) if tuple(tensors[name].shape) != expected[name])
    if missing or wrong:
        first = f"{missing[0]} is missing" if missing else (
            f"{wrong[0]} has shape {tuple(tensors[wrong[0]].shape)} instead of {expected[wrong[0]]}"
        )  # fmt: skip
        raise DataError(f"{actor} does not fit its config.json ({len(missing) + len(wrong)} tensors): {first}")


def with_dtype(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return `config` with the data type of most weights, in which transformers will load them."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        name = str(tensor.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + tensor.numel()
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return {**config, key: max(sizes, key=lambda name: sizes[name])}


def write_model(tensors: Tensors, value_of: Callable[[str], torch.Tensor], target: Path) -> None:
    """Write `tensors` to `target`, file by file. The index, which completes the model, is written last."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    plan = split_torch_state_dict_into_shards(tensors, max_shard_size=LARGEST_FILE)
    temporary = temporary_sibling(target)
    when_room(temporary.mkdir, temporary)
    try:
        for name, members in plan.filename_to_tensors.items():
            shard = {key: value_of(key).contiguous().clone() for key in members}
            when_room(partial(save_file, shard, temporary / name, {"format": "pt"}), temporary / name)
            del shard
            sync_file(temporary / name)
        for name in plan.filename_to_tensors:
            (temporary / name).replace(target / name)
    finally:
        remove_tree(temporary)
    if plan.is_sharded:
        write_json(target / INDEX, {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename})
    sync_file(target)


def _stop_tokens(target: Path) -> None:
    """Add the tokens that end an answer in the chat template to `generation_config.json`, for other programs."""
    settings = target / "tokenizer_config.json"
    if not any(target.glob("chat_template*")) and not (settings.is_file() and "chat_template" in settings.read_text()):
        return
    try:
        tokenizer = load_tokenizer(str(target))
    except (OSError, ValueError) as error:
        log.warning("%s: generation_config.json is left as it is, as the tokenizer cannot be loaded: %s", target, error)
        return
    write_stop_tokens(target, tokenizer)


def copy_companions(source: Path, target: Path, patterns: Iterable[str] = COMPANIONS) -> None:
    """Copy files of a model's folder that `target` lacks.

    A chat template that `target` has is the one used in training, so no other is copied.
    """
    has_template = any(target.glob("chat_template*"))
    for path in (path for pattern in patterns for path in source.glob(pattern)):
        name = path.relative_to(source)
        if path.is_file() and not (target / name).exists() and not (has_template and "chat_template" in str(name)):
            (target / name).parent.mkdir(exist_ok=True)
            write_atomically(target / name, path.read_bytes(), durable=False)
