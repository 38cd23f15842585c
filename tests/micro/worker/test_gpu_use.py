"""How busy a GPU is comes from NVIDIA's management library; where there is none, nothing is said, and doctor says so.

No machine of the tests has a GPU. In its place stands a library with the same functions and structures, made by the C compiler, so that
what is asked and how the answers are laid out are those of the real one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from m2flow.engines.installed import LIBRARY, find_gpu
from m2flow.micro.controller.supervisor import HeartbeatMetrics
from m2flow.micro.protocol import messages as m
from m2flow.micro.worker.worker_process import HeartbeatSource
from m2flow.observe.spans import SpanBlock

NVML = r"""
#include <string.h>
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int gpu; unsigned long long used; int is_slice; } Device;
typedef Device *nvmlDevice_t;
static Device devices[] = {{37, 5ull << 30, 0}, {100, 7ull << 40, 0}, {0, 1ull << 30, 1}};
static int is_ready = 0;
int nvmlInit_v2(void) { is_ready = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    if (!is_ready) return 1;
    if (index >= 3) return 2;
    *device = &devices[index];
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    if (!is_ready) return 1;
    if (strcmp(uuid, "GPU-b") != 0) return 6;
    *device = &devices[1];
    return 0;
}
int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    if (device->is_slice) return 3;
    rates->gpu = device->gpu;
    rates->memory = 99;
    return 0;
}
int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    memory->total = 11; memory->free = 12; memory->used = device->used;
    return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    place = tmp_path_factory.mktemp("nvml")
    (place / "nvml.c").write_text(NVML)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(place / LIBRARY), str(place / "nvml.c")], check=True)
    return place / LIBRARY


@pytest.mark.parametrize(
    ("device", "visible", "said"),
    [
        ("cuda", "", (0.37, 5 << 30)),
        ("cuda:1", "", (1.0, 7 << 40)),
        ("cuda:0", "1,0", (1.0, 7 << 40)),
        ("cuda:1", "1, 0", (0.37, 5 << 30)),
        ("cuda:0", "GPU-b", (1.0, 7 << 40)),
        ("cuda:2", "", (None, 1 << 30)),
    ],
)
def test_a_gpu_is_asked_under_the_number_or_name_that_it_has_outside(
    library: Path, device: str, visible: str, said: tuple[float | None, int]
) -> None:
    gpu = find_gpu(device, visible, str(library))
    assert gpu is not None
    assert gpu.read() == said


@pytest.mark.parametrize(("device", "visible"), [("cpu", ""), ("cuda:9", ""), ("cuda:0", "GPU-gone"), ("cuda:0,cuda:1", "")])
def test_of_what_is_no_gpu_nothing_is_said(library: Path, device: str, visible: str) -> None:
    assert find_gpu(device, visible, str(library)) is None


def test_without_the_drivers_library_nothing_is_said() -> None:
    assert find_gpu("cuda:0", "", "libthere-is-none.so.1") is None


@pytest.mark.parametrize("device", ["cuda:0", "cuda:2", "cpu"])
def test_what_a_gpu_says_comes_to_the_runs_counters_with_a_heartbeat(library: Path, device: str) -> None:
    stored: list[SpanBlock] = []
    vitals = HeartbeatMetrics(stored.append, lambda peer, body: None)
    body = HeartbeatSource(lambda: (1, False), find_gpu(device, "", str(library)), 0).heartbeat()
    pulse = m.decode_to_controller(body)
    assert isinstance(pulse, m.Heartbeat)
    vitals.heard("rollout-0", "rollout-0.beat", pulse)
    counted = {name: value for block in stored for name, value, _ in block.counts if name.startswith("gpu")}
    expected = {"cuda:0": {"gpu use": 0.37, "gpu memory bytes": 5 << 30}, "cuda:2": {"gpu memory bytes": 1 << 30}, "cpu": {}}
    assert counted == expected[device]


@pytest.mark.parametrize("has_library", [True, False])
def test_doctor_says_whether_gpu_use_is_recorded(library: Path, has_library: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")}
    environment |= {"LD_LIBRARY_PATH": str(library.parent)} if has_library else {}
    done = subprocess.run([sys.executable, "-m", "m2flow", "doctor", "--json"], env=environment, capture_output=True, text=True)
    (found,) = [finding for finding in json.loads(done.stdout) if finding["name"] == "gpu use"]
    if has_library:
        assert (found["state"], found["value"]) == ("ok", "recorded; cuda:0 is 37% busy, 5.0 GiB taken")
    elif not Path("/dev/nvidia0").exists():
        assert found["state"] == "optional"
        assert f"not recorded: {LIBRARY}" in found["value"]
