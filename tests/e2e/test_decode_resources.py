"""What decoding takes over a long life of the process: memory stays flat, nothing is compiled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nvium_titan.decode import DecoderParams, Engine, ScriptedExits
from nvium_titan.decode.forward.native import build
from nvium_titan.decode.forward.native.forward import NativeForward
from tests.helpers.tiny_decoder import exit_scripts, tiny_config

pytestmark = pytest.mark.e2e

_MANY_GENERATIONS = """
import json, random, sys
import torch
from nvium_titan.decode import DecoderParams, Engine, GenerationRequest
from tests.helpers.tiny_decoder import tiny_config

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

engine = Engine(DecoderParams.random(tiny_config(num_layers=12, exit_layers=(3, 6)), seed=0))
draw = random.Random(1)
sizes = []
for number in range(300):
    prompt = [draw.randrange(40) for _ in range(draw.randint(1, 150))]
    generation = engine.generate(prompt, max_new_tokens=draw.randint(1, 60), seed=number)
    if number % 7 == 3:
        next(generation)
        generation.close()
    else:
        generation.result()
    if number % 5 == 4:
        engine.generate_batch(
            [
                GenerationRequest(prompt_ids=prompt[: 1 + len(prompt) // row], max_new_tokens=20)
                for row in (1, 2, 3)
            ]
        ).results()
    sizes.append(resident_bytes())
print(json.dumps(sizes))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_flat_over_300_generations_of_differing_lengths() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MANY_GENERATIONS],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    sizes = json.loads(done.stdout)
    assert len(sizes) == 300
    assert max(sizes[30:]) <= 1.02 * sizes[29], [size >> 20 for size in sizes[::30]]


@pytest.mark.cases
def test_cmp_01_decoding_compiles_nothing_after_its_first_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(DecoderParams.random(tiny_config(), seed=0))  # here, or from the cache
    # The compiled path is really taken: were it off, decoding would go on in torch operations.
    assert isinstance(engine.forward, NativeForward)

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a compiler was started: {args}")

    monkeypatch.setattr(build.subprocess, "run", fail)
    before = build.load_library.cache_info().misses
    for length, script in enumerate(exit_scripts(3, 40).values(), start=1):
        result = engine.generate(
            [1] * length, max_new_tokens=200, policy=ScriptedExits(exit_indices=script)
        ).result()
        assert len(result.token_ids) == 200
    Engine(DecoderParams.random(tiny_config(num_layers=6), seed=1)).generate([1], max_new_tokens=5)
    assert build.load_library.cache_info().misses == before
