"""One SGLang server over two devices, on a CPU two processes with a core each: it computes what one does, whatever way its weights came."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import served_cases
from sglang_here import NEEDS_SGLANG, OPTIONS

from m2flow.engines.servers.sglang import SglangRollout
from m2flow.testing.rollout_suite import Factory, started

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), NEEDS_SGLANG]


def test_a_server_over_two_devices_computes_what_one_does(tmp_path: Path) -> None:
    model = served_cases.small_qwen2(tmp_path / "model", hidden_size=64)
    options = {**OPTIONS, "env": f"{OPTIONS['env']} SGLANG_CPU_OMP_THREADS_BIND=0|1", "start_timeout_s": 600}
    with started(lambda settings: SglangRollout(model, replace(settings, options=options, tp=2))) as first:
        assert isinstance(first, SglangRollout)
        assert first._call("/server_info")["tp_size"] == 2

        def make(way: str) -> Factory:
            return lambda settings: SglangRollout(model, replace(settings, into_server=way, options={**options, "url": first.url}))

        served_cases.assert_computes_what_one_device_does(model, make, ["files", "tensors", "group"])
