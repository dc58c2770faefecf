"""What commands keep out of their logs."""

from __future__ import annotations

import io
import logging

import pytest

from nvium_titan.logs import drop_known_noise, takes_colours


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_warnings_about_torchao_s_enums_are_dropped_and_no_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drop_known_noise()
    log = logging.getLogger("torch.utils._pytree")
    log.warning(
        "%s is an Enum subclass and is now natively supported by torch.compile as an opaque value "
        "type. Calling register_constant() on Enum subclasses is deprecated and will be an error "
        "in a future release.",
        "<enum 'KernelPreference'>",
    )
    log.warning("something else about pytrees")
    assert caplog.messages == ["something else about pytrees"]


def test_colours_are_for_terminals_and_no_color_turns_them_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert takes_colours(Terminal())
    assert not takes_colours(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "")
    assert takes_colours(Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not takes_colours(Terminal())
