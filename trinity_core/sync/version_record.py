"""The record of a published version, and the layout of its tensor file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from trinity_core.files import from_record
from trinity_core.sync.digest import TensorDigest
from trinity_core.sync.tensorfile import Layout, TensorSpec, plan, spec_of
from trinity_core.sync.weight_check import WeightCheck

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class VersionRecord:
    """A loadable version. The record is written atomically after the tensors."""

    version: int
    file: str
    """Path of the tensor file, relative to the record's folder, or absolute."""
    size: int
    nonce: str
    """Unique per publication, so that a reader notices when the same version is published again."""
    aliases: dict[str, str]
    """Name → name under which its tensor is stored (tied embeddings)."""
    check: WeightCheck | None = None
    digests: dict[str, TensorDigest] = field(default_factory=dict)
    """Digests by tensor name, including names in `aliases`."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> VersionRecord | None:
        """Return the record at `path`, or None. Raises DataError for a record written by a newer release."""
        try:
            value = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        check = value.pop("check")
        digests = {name: TensorDigest(*digest) for name, digest in value.pop("digests").items()}
        others = {"check": None if check is None else WeightCheck.from_json(check), "digests": digests}
        return from_record(cls, value | others, path)


@dataclass(frozen=True)
class Payload:
    """Tensors ready to be written, with their layout and aliases."""

    layout: Layout
    tensors: Iterable[tuple[str, torch.Tensor]]
    aliases: dict[str, str]

    def record(
        self, version: int, file: str, check: WeightCheck | None, digests: dict[str, TensorDigest]
    ) -> VersionRecord:
        """Return the record of this payload, written to `file` as `version`, with the written tensors' digests."""
        shared = {alias: digests[name] for alias, name in self.aliases.items()}
        return VersionRecord(version, file, self.layout.size, uuid4().hex, self.aliases, check, digests | shared)


def gather(named: Iterable[tuple[str, torch.Tensor]], specs: Sequence[TensorSpec] | None) -> Payload:
    """Plan the file of `named`.

    With `specs` the tensors are consumed one at a time, so that gathered partitions need no second copy of the model.
    Without, all tensors are held at once. Tied tensors are stored once: they are marked in `specs`, or share memory.
    """
    aliases: dict[str, str]
    if specs is not None:
        aliases = {spec.name: spec.same_as for spec in specs if spec.same_as}
        stored = ((name, tensor) for name, tensor in named if name not in aliases)
        return Payload(plan(spec for spec in specs if not spec.same_as), stored, aliases)
    seen: dict[tuple[object, ...], str] = {}
    aliases = {}
    kept: list[tuple[str, torch.Tensor]] = []
    for name, tensor in named:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
            kept.append((name, tensor))
    return Payload(plan(spec_of(name, tensor) for name, tensor in kept), kept, aliases)
