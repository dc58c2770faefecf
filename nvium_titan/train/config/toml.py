"""TOML files and command-line flags to a tree of config dataclasses, strictly.

A config is a dataclass whose fields are keys or dataclasses again (tables), such as torchtitan's
`Trainer.Config`. Any mistake is a `ConfigError` that names the file or flag, the table, the key and
the value, what was expected, and the nearest valid name.

The rules, beyond TOML's own:
    Keys left out keep their default; a table changes only the keys in it.
    A field with several classes has a `kind`: `[activation_checkpoint] kind = "full"`.
    TOML has no null: leave a key out, or unset an optional key with the word `"none"`.
    Flags: `--table.key value`, `--table.key=value`, `--table.switch`, `--table.no_switch`; lists
    are `--table.key 1 2` or `1,2`; everything else is TOML: `--table.key '{a = 1}'`.
    In the name of a flag, hyphens and underscores are the same.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tomli
import tomli_w

from nvium_titan.errors import ConfigError, NviumError, nearest
from nvium_titan.train.config.fields import (
    NONE,
    FlagWords,
    MismatchError,
    coerce,
    default_of,
    describe,
    kinds_of,
    required,
    settable,
)

__all__ = ["dump_config", "load_config", "save_config"]

ConfigT = TypeVar("ConfigT")


def load_config(default: ConfigT, path: Path | str, flags: Sequence[str] = ()) -> ConfigT:
    """Return a config changed by a TOML file, then by command-line flags.

    Args:
        default: A config dataclass; not changed itself.
        path: The TOML file.
        flags: Command-line words, such as `["--loss.beta", "0.3"]`; they override the file.

    Returns:
        A new config of the same type, checked by its `__post_init__`.

    Raises:
        ConfigError: If the file is missing or not TOML, a table, key or flag is unknown, a value
            has the wrong type, or a check of the config fails.
    """
    path = Path(path)
    table = _read(path)
    given = _parse_flags(flags)
    source = _Source(root=default, file=path, flags=frozenset(given))
    # Merged first and built once, leaves first, so that checks between fields see final values.
    for key_path, value in given.items():
        _assign(table, key_path, value, source)
    config = _build(table, cls=type(default), default=default, path=(), source=source)
    return typing.cast(ConfigT, config)


def dump_config(config: Any) -> str:
    """Return all keys of a config as TOML text, from which `load_config` makes an equal one.

    A key that is None is left out if that is its default, and is `"none"` otherwise.

    Args:
        config: A config dataclass whose type can be built without arguments.
    """
    return tomli_w.dumps(_to_table(config, type(config)()))


def save_config(config: Any, path: Path | str) -> None:
    """Write what `dump_config` returns to a file; its folder must exist."""
    Path(path).write_text(dump_config(config), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where each value came from, for error messages."""

    root: Any
    file: Path
    flags: frozenset[tuple[str, ...]]

    def table(self, path: tuple[str, ...]) -> str:
        """Return the place of a table: its file, its header and the flags that changed it."""
        flags = sorted("--" + ".".join(flag) for flag in self.flags if flag[: len(path)] == path)
        header = f": [{'.'.join(path)}]" if path else ""
        return f"{self.file}{header}{' with ' + ' '.join(flags) if flags else ''}"

    def key(self, path: tuple[str, ...], value: Any) -> str:
        """Return the place and value of a key, as the user wrote it."""
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


def _parse_flags(flags: Sequence[str]) -> dict[tuple[str, ...], FlagWords]:
    given: dict[tuple[str, ...], list[str]] = {}
    current: list[str] | None = None
    for word in flags:
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            current = [value] if has_value else []
            # A flag given twice counts as it came last.
            key_path = tuple(name.replace("-", "_").split("."))
            given.pop(key_path, None)
            given[key_path] = current
        elif current is None:
            raise ConfigError(
                f"unexpected argument {word!r} on the command line; write --section.key value"
            )
        else:
            current.append(word)
    return {path: FlagWords(tuple(words)) for path, words in given.items()}


def _assign(
    table: dict[str, Any], path: tuple[str, ...], value: FlagWords, source: _Source
) -> None:
    for depth, key in enumerate(path[:-1], start=1):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{source.key(path[:depth], table)}: expected a table")
    table[path[-1]] = value


def _build(
    table: Mapping[str, Any], *, cls: type, default: Any, path: tuple[str, ...], source: _Source
) -> Any:
    # `default`, or the defaults of `cls` if it is None, changed by `table`.
    hints = settable(cls)
    changes = {}
    for key, value in table.items():
        at = (*path, key)
        negated = key.removeprefix("no_")
        if key not in hints and hints.get(negated) is bool and value == FlagWords(()):
            changes[negated] = False
        elif key not in hints:
            raise _unknown(key, value, cls, path, source)
        else:
            start = default_of(cls, key) if default is None else getattr(default, key)
            changes[key] = _field(value, hints[key], default=start, path=at, source=source)
    try:
        if default is not None:
            return dataclasses.replace(default, **changes)
        missing = sorted(required(cls) - changes.keys())
        if missing:
            raise ConfigError(f"missing key {', '.join(missing)}")
        return cls(**changes)
    except (NviumError, ValueError, AssertionError) as error:
        raise ConfigError(f"{source.table(path)}: {error}") from error


def _field(value: Any, hint: Any, *, default: Any, path: tuple[str, ...], source: _Source) -> Any:
    kinds = kinds_of(hint)
    if not kinds and not dataclasses.is_dataclass(default):
        return _checked(value, hint, path=path, source=source)
    if not isinstance(value, dict):
        example = "kind" if kinds else next(iter(settable(type(default))), "key")
        raise ConfigError(
            f"{source.key(path, value)}: {'.'.join(path)} is a table, not a key; "
            f"set its keys, such as --{'.'.join(path)}.{example}, or {example} under "
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
    def build_item(table: dict[str, Any], cls: type, index: int) -> Any:
        at = (*path[:-1], f"{path[-1]}[{index}]")
        return _build(table, cls=cls, default=None, path=at, source=source)

    try:
        return coerce(value, hint, build_item)
    except MismatchError as error:
        options = [str(option) for option in typing.get_args(hint)]
        is_choice = typing.get_origin(hint) is typing.Literal
        hint_text = nearest(str(value), options) if is_choice else f"; expected {describe(hint)}"
        raise ConfigError(f"{source.key(path, value)}: {error}{hint_text}") from error


def _unknown(
    key: str, value: Any, cls: type, path: tuple[str, ...], source: _Source
) -> ConfigError:
    """Return the error for a key or table that a class does not have."""
    where = source.key((*path, key), value)
    table = f"[{'.'.join(path)}]" if path else "the top level"
    tables = dict(_walk(source.root))
    if (key,) in tables and not isinstance(value, dict):
        keys = ", ".join(sorted(settable(tables[(key,)])))
        return ConfigError(
            f"{where}: no such key in {table}; [{key}] is a table of its own (keys: {keys})"
        )
    owners = [
        f"[{'.'.join(owner)}]" if owner else "the top level"
        for owner, owner_cls in tables.items()
        if owner != path and key in settable(owner_cls) and (*owner, key) not in tables
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
    return ConfigError(f"{where}: unknown {noun} in {table}{nearest(key, settable(cls))}")


def _to_table(config: Any, default: Any) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, hint in settable(type(config)).items():
        value = getattr(config, key)
        start = default_of(type(config), key) if default is None else getattr(default, key)
        kinds = kinds_of(hint)
        if kinds:
            classes = {name: cls or type(None) for name, cls in kinds.items()}
            kind = next(name for name, cls in classes.items() if type(value) is cls)
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


def _kinds_at(root: Any, path: tuple[str, ...]) -> dict[str, type | None]:
    for key in path[:-1]:
        root = getattr(root, key, None)
    is_field = path and dataclasses.is_dataclass(root)
    return kinds_of(settable(type(root)).get(path[-1])) if is_field else {}


def _has(cls: type | None, key: str) -> bool:
    return cls is not None and key in settable(cls)


def _walk(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type]]:
    """Yield the path and the class of every table of a config."""
    yield path, type(config)
    for key in settable(type(config)):
        value = getattr(config, key)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, (*path, key))


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)
