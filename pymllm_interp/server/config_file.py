"""A YAML file of options, as vLLM's `--config`: its keys are the long options of the command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

JSON_OPTIONS = ("allowed-origins", "allowed-methods", "allowed-headers", "limit-mm-per-prompt")
"""Options with JSON as value."""


def arguments_of(file: Path, parser: argparse.ArgumentParser) -> list[str]:
    """The options of a file, as a command line.

    Args:
        parser: parser of the command.

    Raises:
        OSError: the file cannot be read.
        ValueError: not a mapping of options to values.
    """
    try:
        found = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"--config {file}: not YAML: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(f"--config {file}: expected long options and their values, such as `port: 8000`")
    known = {option for action in parser._actions for option in action.option_strings}
    arguments, model = [], found.pop("model", None)
    for key, value in found.items():
        name = key.replace("_", "-")
        if name in ("config", "help") or f"--{name}" not in known:
            raise ValueError(f"--config {file}: {key!r} is not an option of this command (--help)")
        try:
            arguments += _written(name, value, parser)
        except TypeError as error:
            raise ValueError(f"--config {file}: {key}: {error}") from None
    return arguments if model is None else [str(model), *arguments]


def _written(name: str, value: Any, parser: argparse.ArgumentParser) -> Iterator[str]:
    action = next(action for action in parser._actions if f"--{name}" in action.option_strings)
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise TypeError(f"expected true or false, not {value!r}")
        yield from [f"--{name}"] * value
        return
    if name in JSON_OPTIONS:
        yield f"--{name}={json.dumps(value)}"
        return
    values = [f"{key}={one}" for key, one in value.items()] if isinstance(value, dict) else value
    repeats = isinstance(action, argparse._AppendAction)
    if isinstance(values, list) and not repeats:
        raise TypeError(f"expected one value, not {value!r}")
    for one in values if isinstance(values, list) else [values]:
        if one is None or isinstance(one, bool | list | dict):
            raise TypeError(f"expected text or a number, not {one!r}")
        yield f"--{name}={one}"


def read_config(file: Path, parser: argparse.ArgumentParser) -> None:
    """Make the options of a file the defaults of a command: the command line wins. Repeatable ones are added to.

    Args:
        parser: parser of the command.
    """
    given = parser.parse_args(arguments_of(file, parser))
    parser.set_defaults(**vars(given))
