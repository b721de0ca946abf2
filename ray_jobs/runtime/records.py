"""What a run logs -> files in `<out>/_tracking`, which wait there for the tracking store.

Every record is one file that is written in one step, so a record that was made survives a kill, a
tracking store that does not answer, and the publication of the artifact.
"""

import base64
from typing import Annotated, Literal

from pydantic import Base64Bytes, ConfigDict, Field

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen

TRACKING = "_tracking"


class Begin(Frozen):
    """A stage began, or continues after an attempt that was interrupted."""

    what: Literal["begin"] = "begin"
    name: str
    """What people see as the name of the run."""
    tags: dict[str, str]


class Params(Frozen):
    """Options and choices of a run."""

    what: Literal["params"] = "params"
    values: dict[str, str]


class Metrics(Frozen):
    """Figures by step; those of a stage without steps are of step 0."""

    what: Literal["metrics"] = "metrics"
    values: dict[int, dict[str, float]]


class File(Frozen):
    """A text, a plot, a manifest."""

    what: Literal["file"] = "file"
    name: str
    content: Base64Bytes

    @classmethod
    def of(cls, name: str, content: bytes) -> "File":
        return cls(name=name, content=base64.encodebytes(content))


class Model(Frozen):
    """A trained model, whose weights stay where they are."""

    what: Literal["model"] = "model"
    name: str
    tags: dict[str, str]


class End(Frozen):
    """A stage ended."""

    what: Literal["end"] = "end"
    status: Literal["FINISHED", "FAILED"]


Content = Annotated[Begin | Params | Metrics | File | Model | End, Field(discriminator="what")]


class Record(Frozen):
    """One thing that a run logs."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    fingerprint: str
    """The fingerprint of the artifact, by which its run is found."""
    time_ms: int
    """When it was logged: milliseconds since 1970."""
    content: Content


class Spool:
    """The records of an artifact that the tracking store does not have yet, oldest first."""

    def __init__(self, out: str) -> None:
        """`out`: the folder or URI of the artifact."""
        self._folder = storage.join(out, TRACKING)
        self._names = storage.list_files(self._folder)

    @property
    def folder(self) -> str:
        return self._folder

    @property
    def names(self) -> list[str]:
        """The names of the waiting records, oldest first."""
        return list(self._names)

    def append(self, record: Record) -> None:
        """Make `record` durable."""
        number = int(self._names[-1].partition(".")[0]) + 1 if self._names else 0
        name = f"{number:08d}.json"
        storage.write_bytes(self._path(name), record.model_dump_json().encode())
        self._names.append(name)

    def read(self, name: str) -> Record:
        return Record.model_validate_json(storage.read_bytes(self._path(name)))

    def remove(self, name: str) -> None:
        """Drop a record that the store has; the folder goes with its last one."""
        storage.remove(self._path(name))
        self._names.remove(name)
        if not self._names:
            storage.remove_folder(self._folder)

    def _path(self, name: str) -> str:
        return storage.join(self._folder, name)
