"""What MLflow's page of a run says: a description with links, the data that the run used, and names that it allows."""

from __future__ import annotations

import json
import re
import shlex
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.addresses import read_page_note, studio_links
from trinity_core.data.files import data_files, is_local
from trinity_core.errors import DataError
from trinity_core.tracking.scores import data_digest
from trinity_core.tracking.writers import flatten

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

DESCRIPTION = "mlflow.note.content"
"""The tag that MLflow shows as the description of a run or of an experiment."""
EXPERIMENT = "Runs of the project"
"""How our description of an experiment begins."""
MOST_BYTES = 1 << 30
"""Bytes of files that are read for a fingerprint."""
LONGEST_KEY, LONGEST_MODEL, LONGEST_DATA_SET, LONGEST_DIGEST = 250, 256, 500, 36
"""Characters that MLflow takes (its `utils/validation.py`; the columns of its tables, to which PostgreSQL holds it): of
a metric, parameter, run or assessment, of a registered model, of a data set and its digest."""

SIGNS = {"@": "at", "<": "lt", ">": "gt", "%": "pct"}
"""Words for signs that MLflow allows in no name: names that differ in one stay apart."""
FIRST, FIRST_ENDINGS = "Results", ("/accuracy", "reward/mean")
"""MLflow's page sorts groups of charts by name, capitals first."""
NAME_LENGTH = LONGEST_KEY - len(f"{FIRST}/")
"""Characters of a metric's name: MLflow's limit, with room for its group."""


def shortened(text: str, length: int) -> str:
    """The text; of one that is longer than `length` the beginning, and its checksum."""
    return text if len(text) <= length else f"{text[: length - 9]}_{zlib.crc32(text.encode()):08x}"


def description(job_dir: Path) -> str:
    """Markdown: the run's page, rollouts and logs, as links to Studio while `trinity up` serves it, or as commands."""
    logs = f"Logs: `trinity log --checkpoint-dir {shlex.quote(str(job_dir))}`"
    return " · ".join([*studio_links(job_dir.parent.parent, f"{job_dir.parent.name}/{job_dir.name}"), logs])


def experiment_description(project_dir: Path, described: str = "") -> str:
    """Markdown: what a project's experiment holds, and where its runs are shown; `described` if a person wrote it."""
    if described and not described.startswith(EXPERIMENT):
        return described
    studio = read_page_note(project_dir.parent, "studio").get("url")
    runs = f"[All runs in Studio]({studio}/runs)" if studio else "All runs in Studio: `trinity up`"
    return f"{EXPERIMENT} `{project_dir.name}`, in `{project_dir}` · {runs}"


def dataset_inputs(config: Mapping[str, Any]) -> list[DatasetInput]:
    """The data sets of a run, with the fingerprint of their files; a hub data set's is its name."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for context, data_set in _data(config):
        path = str(data_set["path"])
        digest = _digest(path, str(data_set.get("split") or ""), data_set.get("subset_name"))
        kind = "local" if is_local(path) else "hugging_face"
        name = shortened(str(data_set.get("name") or Path(path).name), LONGEST_DATA_SET)
        dataset = Dataset(
            name, digest[-LONGEST_DIGEST:], kind, json.dumps({"uri": path, "split": data_set.get("split")})
        )
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", context)]))
    return inputs


def _digest(path: str, split: str, subset: str | None) -> str:
    """Digest of the contents, or of large data of the size: a start does not wait for terabytes to be read."""
    try:
        size = sum(file.stat().st_size for file in data_files(path, split, subset)) if is_local(path) else 0
    except DataError:
        size = 0
    return f"{size} bytes" if size > MOST_BYTES else data_digest(path, split, subset)


def _data(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Context → settings of each data set that has a path."""
    buffer = config.get("buffer") or {}
    explorer, trainer = buffer.get("explorer_input") or {}, buffer.get("trainer_input") or {}
    data_sets = [
        ("training", explorer.get("taskset")),
        *(("training", tasks) for tasks in explorer.get("tasksets") or ()),
    ]
    data_sets += [("evaluation", tasks) for tasks in explorer.get("eval_tasksets") or ()]
    data_sets.append(("training", trainer.get("experience_buffer")))
    for context, data_set in data_sets:
        if data_set and data_set.get("path") and "://" not in str(data_set["path"]):
            yield context, data_set


def allowed_name(name: str) -> str:
    """The name of a metric or parameter as MLflow allows it: `pass@4` becomes `pass_at_4`.

    Letters of any script are allowed. As names may be files, no part between two `/` may be empty or of dots alone:
    `_` stands for it. The end of a longer name is its checksum.
    """
    allowed = re.sub(r"[^\w\-. :/]", "_", re.sub("[@<>%]", lambda sign: f"_{SIGNS[sign[0]]}_", name))
    plain = "/".join(part if part.strip(".") else "_" for part in allowed.split("/"))
    return shortened(plain, NAME_LENGTH)


def parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """A configuration's settings by names that MLflow allows; of names that become one, all but the first are
    numbered."""
    params: dict[str, str] = {}
    for name, value in flatten(config).items():
        unique, number = allowed_name(name), 1
        while unique in params:
            number += 1
            unique = allowed_name(f"{name}_{number}")
        params[unique] = value
    return params


def names_of(name: str) -> list[str]:
    """A metric's names in MLflow: those that a person looks at first are also in the first group of charts."""
    return [name, f"{FIRST}/{name.replace('/', ' ')}"] if name.endswith(FIRST_ENDINGS) else [name]
