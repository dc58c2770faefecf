"""The keys of config classes, with their kinds and types, and the conversion of values to them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tomli
import tyro

NONE = "none"
"""None in TOML and on the command line: it unsets an optional key and, as a kind, a table."""

BuildItem = Callable[[dict[str, Any], type, int], Any]
"""Builds a dataclass from a table in a list, and its index there."""


class MismatchError(Exception):
    """A value does not fit the type of its field."""


@dataclass(frozen=True)
class FlagWords:
    """The words after a flag; only the type of the field tells how to convert them."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


def settable(cls: type) -> dict[str, Any]:
    """Return the type of each key of a config class, without `Annotated` and hidden fields."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        field.name: _strip(hints[field.name])
        for field in dataclasses.fields(cls)
        if field.init and tyro.conf.Suppress not in getattr(hints[field.name], "__metadata__", ())
    }


def kinds_of(hint: Any) -> dict[str, type | None]:
    """Return the classes that a union field may hold, by the names in its annotation."""
    hint = _strip(hint)
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return {}
    kinds: dict[str, type | None] = {}
    for member in typing.get_args(hint):
        names = [mark.name for mark in getattr(member, "__metadata__", ()) if hasattr(mark, "name")]
        if names:
            cls = _strip(member)
            kinds[names[0].replace("-", "_")] = None if cls is type(None) else cls
    return kinds


def default_of(cls: type, key: str) -> Any:
    """Return the default of a field, None if it has none."""
    field = next(field for field in dataclasses.fields(cls) if field.name == key)
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def required(cls: type) -> set[str]:
    """Return the fields without a default."""
    return {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }


def _strip(hint: Any) -> Any:
    while typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    return hint


def _members(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return tuple(_strip(member) for member in typing.get_args(hint)) if is_union else (hint,)


def _type_name(value: Any) -> str:
    names = {str: "string", dict: "table", list: "list", float: "float", int: "int", bool: "bool"}
    return names.get(type(value), type(value).__name__)


def describe(hint: Any) -> str:
    """Return a type in the words of a message, such as `list of int, or "none"`."""
    members = [member for member in _members(hint) if member is not type(None)]
    optional = ', or "none"' if len(members) < len(_members(hint)) else ""
    if len(members) > 1:
        return " or ".join(describe(member) for member in members) + optional
    hint = members[0]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(json.dumps(option) for option in args) + optional
    if origin is list:
        return f"list of {describe(args[0])}{optional}"
    if origin is tuple:
        return f"list [{', '.join(describe(arg) for arg in args)}]{optional}"
    if hint is dict or origin is dict or dataclasses.is_dataclass(hint):
        return f"table{optional}"
    return {str: "string"}.get(hint, getattr(hint, "__name__", str(hint))) + optional


def coerce(value: Any, hint: Any, build_item: BuildItem) -> Any:
    """Return a TOML value, or the words of a flag, as the type of a field.

    The only conversions of a TOML value are from int to float and from list to tuple.

    Args:
        value: From a TOML file, or `FlagWords`.
        hint: The field's type.
        build_item: Called for each table in a list of dataclasses.

    Raises:
        MismatchError: If the value is not of that type; the message says how it differs.
    """
    if isinstance(value, FlagWords):
        value = _from_words(value.words, hint)
    members = _members(hint)
    if value == NONE and type(None) in members:
        return None
    members = tuple(member for member in members if member is not type(None))
    if len(members) > 1:
        for member in sorted(members, key=lambda member: member is not type(value)):
            with contextlib.suppress(MismatchError):
                return coerce(value, member, build_item)
        raise MismatchError(f"wrong type {_type_name(value)}")
    hint = members[0]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if any(value == option and type(value) is type(option) for option in args):
            return value
        raise MismatchError("not one of the choices")
    if origin in (list, tuple) and isinstance(value, list | tuple):
        return origin(_coerce_items(value, hint, build_item))
    if origin is dict and isinstance(value, dict):
        return {key: coerce(item, args[1], build_item) for key, item in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if hint is Any or type(value) is hint:
        return value
    raise MismatchError(f"wrong type {_type_name(value)}")


def _coerce_items(values: Sequence[Any], hint: Any, build_item: BuildItem) -> Iterator[Any]:
    args = typing.get_args(hint)
    is_open = typing.get_origin(hint) is list or args[-1] is Ellipsis
    if not is_open and len(args) != len(values):
        raise MismatchError(f"wrong length {len(values)}")
    for index, value in enumerate(values):
        item_hint = args[0] if is_open else args[index]
        if dataclasses.is_dataclass(item_hint) and isinstance(value, dict):
            yield build_item(value, typing.cast(type, item_hint), index)
            continue
        try:
            yield coerce(value, item_hint, build_item)
        except MismatchError as error:
            raise MismatchError(f"item {index + 1} has the {error}") from error


def _from_words(words: tuple[str, ...], hint: Any) -> Any:
    # The TOML value that the words stand for in a field of this type.
    members = _members(hint)
    if type(None) in members and [word.lower() for word in words] == [NONE]:
        return NONE
    origins = {typing.get_origin(member) for member in members}
    if words and words[0][:1] in ("[", "{") and origins & {list, tuple, dict}:
        try:
            return tomli.loads(f"value = {' '.join(words)}")["value"]
        except tomli.TOMLDecodeError as error:
            raise MismatchError(f"not valid TOML ({error})") from error
    for member in members:
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin in (list, tuple):
            items = [item for word in words for item in word.split(",") if item]
            return [_from_words((item,), args[0]) for item in items]
        if member is bool and [word.lower() for word in words] in ([], ["true"], ["false"]):
            return [word.lower() for word in words] != ["false"]
        if member in (int, float) and len(words) == 1:
            with contextlib.suppress(ValueError):
                return member(words[0])
        if (member is str or origin is typing.Literal) and len(words) == 1:
            return words[0]
    raise MismatchError("cannot be read as that type" if words else "no value given")
