"""TOML files and command-line flags onto a tree of config dataclasses, strictly.

A config is a dataclass whose fields are keys or nested dataclasses (tables), such as torchtitan's
``Trainer.Config``. The file and the flags are merged first, a flag being one more assignment, and
the config is built once, leaves first: a check between fields therefore sees the final values. Any
mistake is a ``ConfigError`` that names the file or flag, the table, the key, the value, what was
expected and the nearest valid name.

The rules, beyond TOML's own:
    Left-out keys keep their default; a table changes only the keys it names.
    A field that has several classes takes a ``kind``: ``[activation_checkpoint] kind = "full"``.
    TOML has no null: leave a key out, or unset an optional key with the word ``"none"``.
    Flags: ``--table.key value``, ``--table.key=value``, ``--table.switch``, ``--table.no_switch``,
    lists as ``--table.key 1 2`` or ``1,2``, anything else as TOML: ``--table.key '{a = 1}'``.
    Hyphens and underscores in a flag's name are the same.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tomli
import tomli_w
import tyro

from nvium_titan.errors import ConfigError, NviumError, nearest

__all__ = ["dump_config", "load_config", "save_config"]

ConfigT = TypeVar("ConfigT")

NONE = "none"
"""The word that unsets an optional key, and the kind of a table that is switched off."""


def load_config(default: ConfigT, path: Path | str, flags: Sequence[str] = ()) -> ConfigT:
    """Return ``default`` changed by a TOML file and then by command-line flags.

    Args:
        default: A config dataclass; left as it is.
        path: The TOML file.
        flags: Command-line words, such as ``["--loss.beta", "0.3"]``; they win over the file.

    Returns:
        A new config of the type of ``default``, whose ``__post_init__`` checks have run.

    Raises:
        ConfigError: If the file is missing or not TOML, a table, key or flag is unknown, a value is
            of the wrong type, or a check of the config refuses the combination.
    """
    path = Path(path)
    table = _read(path)
    given = _parse_flags(flags)
    source = _Source(root=default, file=path, flags=frozenset(given))
    for key_path, value in given.items():
        _assign(table, key_path, value, source)
    config = _build(table, cls=type(default), default=default, path=(), source=source)
    return typing.cast(ConfigT, config)


def dump_config(config: Any) -> str:
    """Return every key of a config as TOML text that ``load_config`` reads back to an equal one.

    Keys that are None are left out if None is also their default, and are ``"none"`` otherwise.

    Args:
        config: A config dataclass whose type can be built without arguments.
    """
    return tomli_w.dumps(_to_table(config, type(config)()))


def save_config(config: Any, path: Path | str) -> None:
    """Write ``dump_config`` to a file, in a folder that exists."""
    Path(path).write_text(dump_config(config), encoding="utf-8")


@dataclass(frozen=True)
class _FlagWords:
    """The words after a flag, not converted yet: only the field's type says how."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


class _MismatchError(Exception):
    """A value does not fit the type of its field."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where each value came from, for error messages."""

    root: Any
    file: Path
    flags: frozenset[tuple[str, ...]]

    def table(self, path: tuple[str, ...]) -> str:
        """Return the place of a table: file and header, and flags that went into it."""
        flags = sorted("--" + ".".join(flag) for flag in self.flags if flag[: len(path)] == path)
        header = f": [{'.'.join(path)}]" if path else ""
        return f"{self.file}{header}{' with ' + ' '.join(flags) if flags else ''}"

    def key(self, path: tuple[str, ...], value: Any) -> str:
        """Return the place and the value of a key, as its user wrote it."""
        if path in self.flags:
            return f"--{'.'.join(path)} {value}".rstrip()
        header = f"[{'.'.join(path[:-1])}] " if path[:-1] else ""
        if isinstance(value, dict):
            return f"{self.file}: [{'.'.join(path)}]"
        return f"{self.file}: {header}{path[-1]} = {_shown(value)}"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        folder = path.resolve().parent
        files = [file.name for file in folder.glob("*.toml")] if folder.is_dir() else []
        hint = nearest(path.name, files) if files else f"; no .toml file in {folder}"
        raise ConfigError(f"{path}: no such config file{hint}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason}") from error
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _parse_flags(flags: Sequence[str]) -> dict[tuple[str, ...], _FlagWords]:
    given: dict[tuple[str, ...], list[str]] = {}
    current: list[str] | None = None
    for word in flags:
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            current = [value] if has_value else []
            # The last one wins, as everywhere on a command line.
            given[tuple(name.replace("-", "_").split("."))] = current
        elif current is None:
            raise ConfigError(
                f"unexpected argument {word!r} on the command line; write --section.key value"
            )
        else:
            current.append(word)
    return {path: _FlagWords(tuple(words)) for path, words in given.items()}


def _assign(
    table: dict[str, Any], path: tuple[str, ...], value: _FlagWords, source: _Source
) -> None:
    for depth, key in enumerate(path[:-1], start=1):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{source.key(path[:depth], table)}: expected a table")
    table[path[-1]] = value


def _build(
    table: Mapping[str, Any], *, cls: type, default: Any, path: tuple[str, ...], source: _Source
) -> Any:
    # An instance of `cls`: `default` (None: the class's own defaults) changed by `table`.
    hints = _settable(cls)
    changes = {}
    for key, value in table.items():
        at = (*path, key)
        negated = key.removeprefix("no_")
        if key not in hints and hints.get(negated) is bool and value == _FlagWords(()):
            changes[negated] = False
        elif key not in hints:
            raise _unknown(key, value, cls, path, source)
        else:
            start = _default_of(cls, key) if default is None else getattr(default, key)
            changes[key] = _field(value, hints[key], default=start, path=at, source=source)
    try:
        if default is not None:
            return dataclasses.replace(default, **changes)
        missing = sorted(_required(cls) - changes.keys())
        if missing:
            raise ConfigError(f"missing key {', '.join(missing)}")
        return cls(**changes)
    except (NviumError, ValueError, AssertionError) as error:
        raise ConfigError(f"{source.table(path)}: {error}") from error


def _field(value: Any, hint: Any, *, default: Any, path: tuple[str, ...], source: _Source) -> Any:
    kinds = _kinds(hint)
    if not kinds and not dataclasses.is_dataclass(default):
        return _checked(value, hint, path=path, source=source)
    if not isinstance(value, dict):
        example = "kind" if kinds else next(iter(_settable(type(default))), "key")
        raise ConfigError(
            f"{source.key(path, value)}: {'.'.join(path)} is a table, not a key; "
            f"set its keys, such as --{'.'.join(path)}.{example} or {example} under "
            f"[{'.'.join(path)}]"
        )
    cls: type | None = type(default)
    if kinds and "kind" in value:
        value = dict(value)
        kind = _checked(
            value.pop("kind"),
            typing.Literal[tuple(kinds)],
            path=(*path, "kind"),
            source=source,
        )
        cls = kinds[kind]
    if cls is None or (default is None and cls is type(None)):
        if value:
            raise ConfigError(
                f"{source.key(path, value)} is switched off (kind {NONE!r}), so it has no key "
                f"{next(iter(value))!r}; choose a kind: {', '.join(sorted(kinds))}"
            )
        return None
    start = default if type(default) is cls else None
    return _build(value, cls=cls, default=start, path=path, source=source)


def _checked(value: Any, hint: Any, *, path: tuple[str, ...], source: _Source) -> Any:
    try:
        return _coerce(value, hint, path=path, source=source)
    except _MismatchError as error:
        options = [str(option) for option in typing.get_args(hint)]
        is_choice = typing.get_origin(hint) is typing.Literal
        hint_text = nearest(str(value), options) if is_choice else f"; expected {_describe(hint)}"
        raise ConfigError(f"{source.key(path, value)}: {error}{hint_text}") from error


def _coerce(value: Any, hint: Any, *, path: tuple[str, ...], source: _Source) -> Any:
    if isinstance(value, _FlagWords):
        value = _from_words(value.words, hint)
    if hint is Any:
        return value
    members = _members(hint)
    if value == NONE and type(None) in members:
        return None
    members = tuple(member for member in members if member is not type(None))
    if len(members) == 1:
        hint = members[0]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if len(members) > 1:
        for member in sorted(members, key=lambda member: member is not type(value)):
            try:
                return _coerce(value, member, path=path, source=source)
            except _MismatchError:
                continue
    elif origin is typing.Literal:
        if any(value == option and type(value) is type(option) for option in args):
            return value
        raise _MismatchError("not one of the choices")
    elif origin in (list, tuple):
        if isinstance(value, list | tuple):
            coerced = []
            for index, (item, item_hint) in enumerate(
                zip(value, _item_types(hint, len(value)), strict=True)
            ):
                at = (*path[:-1], f"{path[-1]}[{index}]")
                try:
                    coerced.append(_coerce_item(item, item_hint, path=at, source=source))
                except _MismatchError as error:
                    raise _MismatchError(f"item {index + 1} has the {error}") from error
            return tuple(coerced) if origin is tuple else coerced
    elif hint is dict or origin is dict:
        if isinstance(value, dict):
            item_hint = args[1] if args else Any
            return {
                key: _coerce(item, item_hint, path=path, source=source)
                for key, item in value.items()
            }
    elif hint is float and type(value) is int:
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise _MismatchError(f"wrong type {_type_name(value)}")


def _coerce_item(value: Any, hint: Any, *, path: tuple[str, ...], source: _Source) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise _MismatchError(f"wrong type {_type_name(value)}")
        return _build(value, cls=typing.cast(type, hint), default=None, path=path, source=source)
    return _coerce(value, hint, path=path, source=source)


def _from_words(words: tuple[str, ...], hint: Any) -> Any:
    # The words of a flag as the TOML value that a field of this type would have.
    members = _members(hint)
    if type(None) in members and len(words) == 1 and words[0].lower() == NONE:
        return NONE
    for member in members:
        origin, args = typing.get_origin(member), typing.get_args(member)
        if words and words[0][:1] in ("[", "{") and (origin in (list, tuple, dict)):
            try:
                return tomli.loads(f"value = {' '.join(words)}")["value"]
            except tomli.TOMLDecodeError as error:
                raise _MismatchError(f"not valid TOML ({error})") from error
        if origin in (list, tuple):
            items = [item for word in words for item in word.split(",") if item]
            return [_from_words((item,), args[0]) for item in items]
        if member is bool and not words:
            return True
        if len(words) != 1:
            continue
        if member is bool and words[0].lower() in ("true", "false"):
            return words[0].lower() == "true"
        if member in (int, float):
            try:
                return member(words[0])
            except ValueError:
                continue
        if member is str or origin is typing.Literal:
            return words[0]
    if not words:
        raise _MismatchError("no value given")
    raise _MismatchError("cannot be read as that type")


def _unknown(
    key: str, value: Any, cls: type, path: tuple[str, ...], source: _Source
) -> ConfigError:
    """Return the error for a key or table that ``cls`` does not have."""
    where = source.key((*path, key), value)
    table = f"[{'.'.join(path)}]" if path else "the top level"
    tables = dict(_walk(source.root))
    if (key,) in tables and not isinstance(value, dict):
        keys = ", ".join(sorted(_settable(tables[(key,)])))
        return ConfigError(
            f"{where}: no such key in {table}; [{key}] is a table of its own (keys: {keys})"
        )
    owners = [
        f"[{'.'.join(owner)}]" if owner else "the top level"
        for owner, owner_cls in tables.items()
        if owner != path and key in _settable(owner_cls) and (*owner, key) not in tables
    ]
    if owners and not isinstance(value, dict):
        return ConfigError(f"{where}: no such key in {table}; it belongs in {', '.join(owners)}")
    if isinstance(value, dict):
        names = {".".join(name) for name in tables if name}
        return ConfigError(f"{where}: unknown table{nearest('.'.join((*path, key)), names)}")
    others = [kind for kind, other in _kinds_at(source.root, path).items() if _has(other, key)]
    if others:
        return ConfigError(f"{where}: {table} has this key only with kind = {others[0]!r}")
    noun = "flag" if (*path, key) in source.flags else "key"
    return ConfigError(f"{where}: unknown {noun} in {table}{nearest(key, _settable(cls))}")


def _to_table(config: Any, default: Any) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, hint in _settable(type(config)).items():
        value = getattr(config, key)
        start = _default_of(type(config), key) if default is None else getattr(default, key)
        kinds = _kinds(hint)
        if kinds:
            kind = next(name for name, cls in kinds.items() if _is_a(value, cls))
            start = start if type(start) is type(value) else None
            table[key] = {"kind": kind} | ({} if value is None else _to_table(value, start))
        elif dataclasses.is_dataclass(value):
            start = start if type(start) is type(value) else None
            table[key] = _to_table(value, start)
        elif value is not None:
            table[key] = _plain(value)
        elif start is not None:
            table[key] = NONE
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return _to_table(value, None) if dataclasses.is_dataclass(value) else value


def _settable(cls: type) -> dict[str, Any]:
    """Return the type of each key of a config class, without ``Annotated`` and hidden fields."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        field.name: hints[field.name] if _kinds(hints[field.name]) else _strip(hints[field.name])
        for field in dataclasses.fields(cls)
        if field.init and tyro.conf.Suppress not in getattr(hints[field.name], "__metadata__", ())
    }


def _kinds(hint: Any) -> dict[str, type | None]:
    """Return the classes a union field may hold, by the name its annotation gives each."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return {}
    kinds: dict[str, type | None] = {}
    for member in typing.get_args(hint):
        names = [mark.name for mark in getattr(member, "__metadata__", ()) if hasattr(mark, "name")]
        if names:
            cls = _strip(member)
            kinds[names[0].replace("-", "_")] = None if cls is type(None) else cls
    return kinds


def _kinds_at(root: Any, path: tuple[str, ...]) -> dict[str, type | None]:
    for key in path[:-1]:
        root = getattr(root, key, None)
    is_field = path and dataclasses.is_dataclass(root)
    return _kinds(_settable(type(root)).get(path[-1])) if is_field else {}


def _has(cls: type | None, key: str) -> bool:
    return cls is not None and key in _settable(cls)


def _walk(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type]]:
    """Yield the path and class of every table that a config has now."""
    yield path, type(config)
    for key in _settable(type(config)):
        value = getattr(config, key)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, (*path, key))


def _default_of(cls: type, key: str) -> Any:
    field = next(field for field in dataclasses.fields(cls) if field.name == key)
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _required(cls: type) -> set[str]:
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


def _item_types(hint: Any, length: int) -> tuple[Any, ...]:
    args = typing.get_args(hint)
    if typing.get_origin(hint) is list or args[-1] is Ellipsis:
        return (args[0],) * length
    if len(args) != length:
        raise _MismatchError(f"wrong length {length}")
    return args


def _is_a(value: Any, cls: type | None) -> bool:
    return value is None if cls is None else type(value) is cls


def _type_name(value: Any) -> str:
    names = {str: "string", dict: "table", list: "list", float: "float", int: "int", bool: "bool"}
    return names.get(type(value), type(value).__name__)


def _describe(hint: Any) -> str:
    """Return a type in the words of a message: ``list of int, or "none"``."""
    members = [member for member in _members(hint) if member is not type(None)]
    optional = ', or "none"' if len(members) < len(_members(hint)) else ""
    if len(members) > 1:
        return " or ".join(_describe(member) for member in members) + optional
    hint = members[0]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(json.dumps(option) for option in args) + optional
    if origin is list:
        return f"list of {_describe(args[0])}{optional}"
    if origin is tuple:
        return f"list [{', '.join(_describe(arg) for arg in args)}]{optional}"
    if hint is dict or origin is dict or dataclasses.is_dataclass(hint):
        return f"table{optional}"
    return {str: "string"}.get(hint, getattr(hint, "__name__", str(hint))) + optional


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)
