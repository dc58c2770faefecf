# ruff: noqa: E501 - one case a line
"""The TOML layer on a small config of the same shape as the trainer's."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import tyro

from nvium_titan.errors import ConfigError
from nvium_titan.train.config.toml import load_config, save_config


@dataclass(kw_only=True, slots=True)
class Full:
    preserve_rng: bool = True


@dataclass(kw_only=True, slots=True)
class Budget:
    memory_budget: float = 0.5


@dataclass(kw_only=True, slots=True)
class Group:
    pattern: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Loader:
    path: str | list[str] = ""
    infinite: bool = True


@dataclass(kw_only=True, slots=True)
class Validator:
    freq: int = 10
    loader: Loader = field(default_factory=Loader)


@dataclass(kw_only=True, slots=True)
class Training:
    steps: int = 100
    max_norm: float | int = 1.0
    dtype: Literal["bfloat16", "float32"] = "float32"
    compile_: bool = False


@dataclass(kw_only=True, slots=True)
class Nvium:
    num_exits: int = 3
    exit_layers: list[int] | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    balancer: str | None = "headtail"
    names: list[list[str]] | None = None


@dataclass(kw_only=True, slots=True)
class Config:
    spec: Annotated[Any, tyro.conf.Suppress] = None
    folder: str = "out"
    training: Training = field(default_factory=Training)
    nvium: Nvium = field(default_factory=Nvium)
    validator: Validator = field(default_factory=Validator)
    groups: list[Group] = field(default_factory=list)
    ac: (
        Annotated[Full, tyro.conf.subcommand("full")]
        | Annotated[Budget, tyro.conf.subcommand("memory-budget")]
        | Annotated[None, tyro.conf.subcommand("none")]
    ) = field(default_factory=Full)

    def __post_init__(self) -> None:
        if (
            self.nvium.exit_layers is not None
            and len(self.nvium.exit_layers) >= self.training.steps
        ):
            raise ValueError(
                f"{len(self.nvium.exit_layers)} exits, but only {self.training.steps} steps"
            )


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str = "", *flags: str) -> Config:
        path = tmp_path / "tiny.toml"
        path.write_text(text)
        return load_config(Config(), path, flags)

    return load


def refuses(load, text: str, *flags: str) -> str:
    with pytest.raises(ConfigError, match=r".") as caught:
        load(text, *flags)
    message = str(caught.value)
    return message[message.index("tiny.toml") :]  # without the test's folder


def test_an_empty_file_is_the_default(load):
    assert load() == Config()


def test_a_file_changes_only_what_it_names(load):
    config = load(
        "folder = 'runs'\n[training]\nsteps = 7\nmax_norm = 2\n[validator.loader]\npath = ['a', 'b']"
    )
    assert config == Config(
        folder="runs",
        training=Training(steps=7, max_norm=2),
        validator=Validator(loader=Loader(path=["a", "b"])),
    )
    assert type(config.training.max_norm) is int


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--training.steps", "9"], {"training": Training(steps=9)}),
        (["--training.steps=9"], {"training": Training(steps=9)}),
        (["--training.max-norm", "4e-4"], {"training": Training(max_norm=4e-4)}),
        (["--training.max_norm", "-1"], {"training": Training(max_norm=-1)}),
        (["--training.compile_"], {"training": Training(compile_=True)}),
        (
            ["--validator.loader.no_infinite"],
            {"validator": Validator(loader=Loader(infinite=False))},
        ),
        (
            ["--validator.loader.infinite", "False"],
            {"validator": Validator(loader=Loader(infinite=False))},
        ),
        (["--nvium.exit_layers", "1", "2"], {"nvium": Nvium(exit_layers=[1, 2])}),
        (["--nvium.exit_layers", "1,2"], {"nvium": Nvium(exit_layers=[1, 2])}),
        (["--nvium.exit_layers=[1, 2]"], {"nvium": Nvium(exit_layers=[1, 2])}),
        (["--validator.loader.path", "a,b"], {"validator": Validator(loader=Loader(path="a,b"))}),
        (
            ["--validator.loader.path", "a", "b"],
            {"validator": Validator(loader=Loader(path=["a", "b"]))},
        ),
        (["--validator.loader.path", '["a"]'], {"validator": Validator(loader=Loader(path=["a"]))}),
        (["--nvium.betas", "0.8", "0.9"], {"nvium": Nvium(betas=(0.8, 0.9))}),
        (["--nvium.balancer", "None"], {"nvium": Nvium(balancer=None)}),
        (["--nvium.names", '[["a"], ["b", "c"]]'], {"nvium": Nvium(names=[["a"], ["b", "c"]])}),
        (
            ["--ac.kind", "memory_budget", "--ac.memory_budget", "0.1"],
            {"ac": Budget(memory_budget=0.1)},
        ),
        (["--ac.kind", "none"], {"ac": None}),
        (
            ["--groups", '[{pattern = ".*", kwargs = {lr = 1}}]'],
            {"groups": [Group(pattern=".*", kwargs={"lr": 1})]},
        ),
        (["--folder", "a", "--folder", "b"], {"folder": "b"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags(load, flags, expected):
    assert load("", *flags) == Config(**expected)


def test_kinds_and_lists_of_tables(load):
    config = load(
        "[ac]\nkind = 'memory_budget'\nmemory_budget = 0.3\n"
        "[[groups]]\npattern = 'bias$'\nkwargs = {lr = 1e-3}\n[[groups]]\npattern = '.*'"
    )
    assert config.ac == Budget(memory_budget=0.3)
    assert config.groups == [Group(pattern="bias$", kwargs={"lr": 1e-3}), Group(pattern=".*")]
    assert load("[ac]\nkind = 'none'").ac is None


def test_checks_between_fields_see_the_flags(load):
    text = "[training]\nsteps = 2\n[nvium]\nexit_layers = [1, 2]"
    assert load(text, "--training.steps", "3").training.steps == 3
    assert refuses(load, text) == "tiny.toml: 2 exits, but only 2 steps"
    message = refuses(load, "", "--nvium.exit_layers", "1", "--training.steps", "1")
    assert message.endswith(
        "tiny.toml with --nvium.exit_layers --training.steps: 1 exits, but only 1 steps"
    )


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("[training]\nsteps = 'ten'", [], 'tiny.toml: [training] steps = "ten": wrong type string; expected int'),
        ("[training]\nsteps = 1.0", [], "tiny.toml: [training] steps = 1.0: wrong type float; expected int"),
        ("[training]\nsteps = true", [], "tiny.toml: [training] steps = true: wrong type bool; expected int"),
        ("[training]\ncompile_ = 1", [], "tiny.toml: [training] compile_ = 1: wrong type int; expected bool"),
        (
            "[training]\ndtype = 'bf16'",
            [],
            'tiny.toml: [training] dtype = "bf16": not one of the choices; did you mean '
            "'bfloat16'? (valid: bfloat16, float32)",
        ),
        (
            "[nvium]\nexit_layers = ['a']",
            [],
            'tiny.toml: [nvium] exit_layers = ["a"]: item 1 has the wrong type string; expected list of int, or "none"',
        ),
        ("[nvium]\nbetas = [0.9]", [], "tiny.toml: [nvium] betas = [0.9]: wrong length 1; expected list [float, float]"),
        (
            "training = 3",
            [],
            "tiny.toml: training = 3: training is a table, not a key; set its keys, such as "
            "--training.steps, or steps under [training]",
        ),
        (
            "[ac]\nkind = 'ful'",
            [],
            "tiny.toml: [ac] kind = \"ful\": not one of the choices; did you mean 'full'? "
            "(valid: full, memory_budget, none)",
        ),
        ("[ac]\nmemory_budget = 0.3", [], "tiny.toml: [ac] memory_budget = 0.3: [ac] has this key only with kind = 'memory_budget'"),
        (
            "[ac]\nkind = 'none'\nmemory_budget = 0.3",
            [],
            "tiny.toml: [ac] is switched off (kind 'none'), so it has no key 'memory_budget'; "
            "choose a kind: full, memory_budget, none",
        ),
        ("[[groups]]\nkwargs = {}", [], "tiny.toml: [groups[0]]: missing key pattern"),
        (
            "[[groups]]\npattern = 'a'\nlr = 1",
            [],
            "tiny.toml: [groups[0]] lr = 1: unknown key in [groups[0]] (valid: kwargs, pattern)",
        ),
        ("spec = 1", [], "tiny.toml: spec = 1: unknown key in the top level"),
        ("", ["--training.steps", "ten"], "--training.steps ten: cannot be read as that type; expected int"),
        ("", ["--training.steps"], "--training.steps: no value given; expected int"),
        ("", ["--training.step", "3"], "--training.step 3: unknown flag in [training]; did you mean 'steps'?"),
        ("", ["--steps", "3"], "--steps 3: no such key in the top level; it belongs in [training]"),
        ("", ["--training", "3"], "--training 3: training is a table, not a key"),
        ("", ["steps=3"], "unexpected argument 'steps=3' on the command line; write --section.key value"),
        ("training = 3", ["--training.steps", "3"], "tiny.toml: training = 3: expected a table"),
        ("[training\n", [], "tiny.toml: not valid TOML: "),
    ],
)  # fmt: skip
def test_messages(load, text, flags, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(text, *flags)


@pytest.mark.cases
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[nvium]\nexit_layer = [1, 2]",
            "tiny.toml: [nvium] exit_layer = [1, 2]: unknown key in [nvium]; did you mean "
            "'exit_layers'? (valid: balancer, betas, exit_layers, names, num_exits)",
        ),
        (
            "[nvium]\nac = true",
            "tiny.toml: [nvium] ac = true: no such key in [nvium]; [ac] is a table of its own "
            "(keys: preserve_rng)",
        ),
    ],
    ids=["misspelt", "table"],
)
def test_cfg_01_misspelt_key_is_named_with_its_nearest(load, text, message):
    assert refuses(load, text) == message


@pytest.mark.cases
def test_cfg_02_misplaced_key_is_told_its_table(load):
    assert refuses(load, "[training]\nexit_layers = [1, 2]") == (
        "tiny.toml: [training] exit_layers = [1, 2]: no such key in [training]; "
        "it belongs in [nvium]"
    )
    assert refuses(load, "[training]\nfolder = 'x'").endswith("it belongs in the top level")
    assert refuses(load, "[trainng]\nsteps = 1") == (
        "tiny.toml: [trainng]: unknown table; did you mean 'training'? "
        "(valid: ac, nvium, training, validator, validator.loader)"
    )


@pytest.mark.cases
def test_cfg_05_missing_config_file_is_refused(tmp_path):
    (tmp_path / "debug.toml").touch()
    with pytest.raises(
        ConfigError, match=r"debgu\.toml: no such config file; did you mean 'debug\.toml'\?"
    ):
        load_config(Config(), tmp_path / "debgu.toml")
    with pytest.raises(ConfigError, match=r"no such config file; no \.toml file in .*/nowhere"):
        load_config(Config(), tmp_path / "nowhere" / "x.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(Config(), tmp_path)


@pytest.mark.cases
def test_cfg_07_flags_beat_the_file_and_are_saved(load, tmp_path):
    config = load("[training]\nsteps = 5\nmax_norm = 0.5", "--training.steps", "6")
    save_config(config, tmp_path / "config.toml")
    assert "steps = 6" in (tmp_path / "config.toml").read_text()
    assert load_config(Config(), tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(ac=None),
        Config(ac=Budget(memory_budget=0.25), nvium=Nvium(balancer=None, exit_layers=[1])),
        Config(groups=[Group(pattern=".*", kwargs={"betas": [0.9, 0.95]})]),
        Config(training=Training(max_norm=float("inf")), validator=Validator(loader=Loader(path=["a"]))),
        Config(folder='quote " and \\ and \n newline'),
    ],
    ids=["default", "none", "kind", "groups", "inf", "text"],
)  # fmt: skip
def test_saved_configs_read_back_equal(config, tmp_path):
    save_config(config, tmp_path / "config.toml")
    assert load_config(Config(), tmp_path / "config.toml") == config
