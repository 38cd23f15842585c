"""One SGLang server over two devices, on a CPU two processes with a core each: it computes what one does, whatever way its weights came."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import served_cases
from sglang_here import NEEDS_SGLANG, OPTIONS

from m2flow.engines.contract import EngineSettings
from m2flow.engines.embedded_rollout import EmbeddedRollout
from m2flow.engines.sglang import SglangRollout
from m2flow.recipe import Sampling
from m2flow.testing.rollout_cases import make_request, started

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), NEEDS_SGLANG]

TOKENS = [list(range(2, 13)), [12, 5, 5, 5, 9, 2, 7]]


def test_a_server_over_two_devices_computes_what_one_does(tmp_path: Path) -> None:
    model = served_cases.small_qwen2(tmp_path / "model", hidden_size=64)
    options = {**OPTIONS, "env": f"{OPTIONS['env']} SGLANG_CPU_OMP_THREADS_BIND=0|1"}
    requests = [make_request(prompt, 0, Sampling(40, temperature=0.0)) for prompt in range(4)]
    with started(lambda settings: SglangRollout(model, replace(settings, tp=2, options=options))) as first:
        assert isinstance(first, SglangRollout)
        assert first._call("/server_info")["tp_size"] == 2

        def make(way: str) -> Callable[[EngineSettings], SglangRollout]:
            return lambda settings: SglangRollout(model, replace(settings, tp=2, into_server=way, options={**options, "url": first.url}))

        served_cases.assert_same_as_embedded(model, make("files"), requests)
        for version, way in enumerate(("files", "tensors", "group"), 1):
            with started(make(way)) as engine, started(lambda settings: EmbeddedRollout(model, settings)) as embedded:
                changed = [(name, tensor * (1 + version / 4)) for name, tensor in engine.weights()]
                for one in (engine, embedded):
                    one.load_weights(changed, version)
                for found, expected in itertools.zip_longest(engine.logprobs(TOKENS), embedded.logprobs(TOKENS)):
                    np.testing.assert_allclose(found, expected, atol=1e-4)
