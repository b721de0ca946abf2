"""Stage configurations: frozen, validated once, fingerprinted by what they mean and not by where
they run.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict

T = TypeVar("T")


@dataclass(frozen=True)
class Role:
    """Marks a config field that stays out of the fingerprint: paths (inputs enter by content) and
    resources.
    """

    name: Literal["input", "output", "resource"]


InputPath = Annotated[str, Role("input")]
"""A folder, file or URI that a stage reads; the fingerprint takes what it contains, not what it is
called.
"""
OutputPath = Annotated[str, Role("output")]
"""The folder or URI that a stage writes."""
OptionalInputPath = Annotated[str | None, Role("input")]
"""The same of a stage that can do without this input."""
OptionalOutputPath = Annotated[str | None, Role("output")]
"""The same where the stage has a default."""
Resource = Annotated[T, Role("resource")]
"""`Resource[int]`: how a stage runs (CPUs, memory, tracking); never changes what it writes."""


class Frozen(BaseModel):
    """Immutable record without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class StageConfig(Frozen):
    """Base of every stage's configuration."""

    def replace(self, **changes: object) -> Self:
        """A copy with `changes`, validated again (pydantic's `model_copy(update=...)` validates
        nothing).
        """
        return type(self).model_validate({**self.model_dump(), **changes})

    def semantic_fields(self) -> dict[str, Any]:
        """The JSON form of the fields that decide what the stage writes."""
        skipped = {
            name
            for name, field in type(self).model_fields.items()
            if any(isinstance(mark, Role) for mark in field.metadata)
        }
        return self.model_dump(mode="json", exclude=skipped)


def fingerprint(contract: str, fields: dict[str, Any], inputs: dict[str, str]) -> str:
    """sha256 (hex) over the contract name with its version, the semantic fields and the inputs'
    fingerprints.

    Raises:
        ValueError: a field has no stable JSON form (NaN or infinity).
    """
    content = {"contract": contract, "fields": fields, "inputs": inputs}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
