"""a command line, and the file that its `--config` names -> the options of a script."""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, make_dataclass
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar, Union, cast

import tyro
import yaml  # pyrefly: ignore[untyped-import]
from pydantic import BaseModel, TypeAdapter, ValidationError

from scone_core.artifacts import storage

Options = TypeVar("Options", bound=BaseModel)
ConfigFile = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="FILE",
        help="YAML or JSON file of options by their names, such as what a manifest.json holds "
        "under `config`. Options on the command line override it.",
    ),
]


def read_options(
    kind: type[Options], *, description: str | None, args: Sequence[str] | None = None
) -> Options:
    """The options of a script: from the command line, else from the file that `--config` names,
    else their defaults. A bad command line ends the process with tyro's message.

    Args:
        description: what `--help` says about the script.
        args: in place of `sys.argv`.

    Raises:
        ValueError: the file is missing, unreadable, or has a key or value that `kind` refuses.
    """
    args = sys.argv[1:] if args is None else args
    command = cast(Any, tyro.cli(_with_file(kind, args), description=description, args=args))
    return command.options


def read_command(
    kinds: Mapping[str, type[Options]],
    *,
    description: str | None,
    args: Sequence[str] | None = None,
) -> Options:
    """The options of a script of several commands, whose names are the keys of `kinds`; otherwise
    as `read_options`.
    """
    args = sys.argv[1:] if args is None else args
    files = {
        name: _with_file(kind, args if name in args[:1] else ()) for name, kind in kinds.items()
    }
    commands: Any = Union[  # noqa: UP007
        tuple(Annotated[file, tyro.conf.subcommand(name)] for name, file in files.items())  # pyrefly: ignore
    ]
    return cast(Any, tyro.cli(commands, description=description, args=args)).options


def read_defaults(kind: type[Options], path: str) -> dict[str, Any]:
    """The fields of `kind` that the file at `path` gives, validated one by one: a file may leave
    out what the command line adds.

    Raises:
        ValueError: names file, key and remedy.
    """
    values = {}
    for name, value in _read_mapping(path).items():
        if name not in kind.model_fields:
            raise ValueError(f"{path}: {_unknown(kind, name)}")
        declared = kind.model_fields[name]
        annotation: Any = declared.annotation
        adapter = TypeAdapter(Annotated[annotation, declared])
        try:
            values[name] = adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{path}: {_explain(kind, name, error)}") from error
    return values


def _with_file(kind: type[BaseModel], args: Sequence[str]) -> type:
    """`--config` beside the options of `kind`, whose defaults the file in `args` sets."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    path = parser.parse_known_args(args)[0].config
    required = {name: tyro.MISSING for name, f in kind.model_fields.items() if f.is_required()}
    default = kind.model_construct(**required | (read_defaults(kind, path) if path else {}))
    options = ("options", Annotated[kind, tyro.conf.arg(name="")], field(default=default))
    file = make_dataclass(kind.__name__, [options, ("config", ConfigFile, None)])
    file.__doc__ = kind.__doc__
    return file


def _read_mapping(path: str) -> dict[str, Any]:
    if not storage.exists(path):
        raise ValueError(f"--config {path}: no such file; name a YAML or JSON file of options")
    text = storage.read_bytes(path)
    try:
        content = json.loads(text) if path.endswith(".json") else yaml.load(text, _Loader)
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--config {path}: not readable ({reason}); mend the file") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: holds no options; write one `name: value` a line")
    return {str(name): value for name, value in content.items()}


class _Loader(yaml.SafeLoader):
    """YAML as its version 1.2 and JSON have numbers: 1e-3 is one, too."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _explain(kind: type[BaseModel], name: str, error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join([name, *map(str, first["loc"])])
    if first["type"] == "extra_forbidden":
        return _unknown(kind, place)
    return f"{place}={first['input']!r}: {first['msg']}; `--help` says what it takes"


def _unknown(kind: type[BaseModel], name: str) -> str:
    if name in ("config", "contract"):
        return "this is a whole manifest; give what it holds under its key `config`"
    close = get_close_matches(name.replace("-", "_"), _names(kind), n=1)
    remedy = f"did you mean {close[0]!r}?" if close else "`--help` lists the options"
    return f"{name!r} is no option of this script; {remedy}"


def _names(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, declared in kind.model_fields.items():
        yield prefix + name
        nested = declared.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from _names(nested, f"{prefix}{name}.")
