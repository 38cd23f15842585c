"""The device list: what comes with m2flow, what users add, and what is said of mistakes."""

from pathlib import Path

import pytest

from m2flow.errors import SpecError
from m2flow.planner.pools import GIB, _device_of, device_list, pools_of
from m2flow.runs.cluster_file import load_cluster
from m2flow.spec import ClusterSpec, PoolSpec


@pytest.fixture(autouse=True)
def _no_list_of_this_user(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


def test_the_usual_devices_are_there_with_a_source_for_each_number() -> None:
    known = device_list()
    assert {"a100-40", "a100-80", "h100", "h200", "h20", "b200", "gb200", "l40s", "cpu"} <= set(known.names)
    for name in known.names:
        for field, constant in known.find(name).constants().items():
            assert constant.source, (name, field)
            assert constant.unit, (name, field)
            assert constant.value >= 0, (name, field)
    assert known.find("H100").sources["memory_gb_s"] == "NVIDIA H100 data sheet"


def test_saturation_is_where_the_data_sheets_put_it() -> None:
    for name, batch in (("h100", 295), ("h200", 206)):
        device = device_list().find(name)
        assert device.flops(2) * 2 / (2 * device.memory_gb_s * 1e9) == pytest.approx(batch, rel=0.01)


def test_a_file_of_the_user_adds_and_changes_devices(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(
        "defaults: {train_mfu: {value: 0.5, source: measured}}\n"
        "devices:\n"
        "  h100-pcie: {like: h100, source: a sheet, memory_gb_s: 2000}\n"
        "  l40s: {memory_gib: 44}\n"
    )
    known = device_list(own)
    pcie = known.find("h100-pcie")
    assert (pcie.memory_gb_s, pcie.bf16_tflops, pcie.train_mfu) == (2000, 989.4, 0.5)
    assert (pcie.sources["memory_gb_s"], pcie.sources["bf16_tflops"]) == ("a sheet", "NVIDIA H100 data sheet")
    assert (known.find("l40s").memory_gib, known.find("l40s").bf16_tflops) == (44, 362)


def test_a_cluster_spec_names_a_device_list_from_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("devices: {big: {like: h200, memory_gib: 500}}")
    (tmp_path / "cluster.yaml").write_text("devices: mine.yaml\npools: {main: {device: big}}\n")
    assert pools_of(load_cluster(tmp_path / "cluster.yaml"))["main"].memory_bytes == int(500 * GIB * 0.92)


def test_the_user_s_configuration_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m2flow").mkdir()
    (tmp_path / "m2flow" / "devices.yaml").write_text("devices: {mine: {like: h20}}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert device_list().find("mine").memory_gb_s == 4000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices:\n  x:\n    like: h100\n    memory_gbs: 3\n", r"mine.yaml:4\n  memory_gbs: no such field\n  Did you mean 'memory_gb_s'"),
        ("devices:\n  x: {like: h10}\n", r"mine.yaml:2\n  x: like 'h10'(.|\n)*'h100'"),
        ("devices:\n  x: {like: x}\n", "It is like itself"),
        ("devices:\n  x: {memory_gib: 3}\n", r"mine.yaml:2\n  the device x has no bf16_tflops"),
        ("devices:\n  x: {memory_gib: much}\n", "'much' is no number"),
        ("devices:\n  x: {train_mfu: 1.5}\n", "a fraction of 1"),
        ("devices:\n  x: {memory_gib: -1}\n", "must be positive"),
        ("device:\n  x: {}\n", r"mine.yaml:1\n  device: no such field\n  Did you mean 'devices'"),
        ("- 1\n", r"mine.yaml:1\n  a device list is a mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_a_mistake_in_a_device_list_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(text)
    with pytest.raises(SpecError, match=message):
        device_list(own)


def test_a_pool_of_an_unknown_device_is_told_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"pools.main.device\n  there is no device 'h10'\n  Did you mean 'h100'"):
        pools_of(ClusterSpec(pools={"main": PoolSpec(device="h10")}))


def test_a_pool_says_what_its_spec_says_and_else_what_the_list_says() -> None:
    b_spec = PoolSpec(device="h100", memory_gib=10, host_link_gb_s=2, link_gb_s=1, network_gb_s=8)
    spec = ClusterSpec(pools={"a": PoolSpec(device="h100", nodes=2), "b": b_spec})
    a, b = pools_of(spec).values()
    assert (a.num_devices, a.per_node, a.memory_bytes) == (16, 8, int(80 * GIB * 0.92))
    assert (b.memory_bytes, b.link_bytes_s, b.network_bytes_s) == (int(10 * GIB * 0.92), 0.8e9, 0.8e9)
    assert (a.pinned_bytes_s, b.pinned_bytes_s) == (0.8 * 64e9, 0.8 * 2e9)


def test_a_device_of_a_smaller_node_has_its_share_of_the_network_and_of_the_host_and_no_more() -> None:
    sizes = {num: PoolSpec(device="h100", devices_per_node=num) for num in (1, 4, 8, 16)}
    one, four, eight, sixteen = pools_of(ClusterSpec(pools={f"of-{num}": pool for num, pool in sizes.items()})).values()
    for few in (one, four):
        assert (few.network_bytes_s, few.host_bytes) == (eight.network_bytes_s, eight.host_bytes)
        assert few.host_step_bytes_s == eight.host_step_bytes_s
    assert eight.network_bytes_s == pytest.approx(0.8 * 50e9)
    assert sixteen.network_bytes_s == pytest.approx(eight.network_bytes_s / 2)
    tray = pools_of(ClusterSpec(pools={"tray": PoolSpec(device="gb200", nodes=16, devices_per_node=4)}))["tray"]
    assert tray.network_bytes_s == pytest.approx(0.8 * 50e9)
    own = PoolSpec(device="h100", devices_per_node=1, network_gb_s=100, host_memory_gib=512)  # Of that node.
    (alone,) = pools_of(ClusterSpec(pools={"main": own})).values()
    assert (alone.network_bytes_s, alone.host_bytes) == (0.8 * 100e9, int(512 * GIB * alone.device.usable_host_memory))


def test_without_pools_the_cores_of_this_machine_are_the_devices() -> None:
    (pool,) = pools_of(ClusterSpec(device="cpu", cores=3)).values()
    assert (pool.name, pool.num_devices, pool.device.name, pool.host_bytes) == ("", 3, "cpu", 0)
    (one,) = pools_of(ClusterSpec(device="cpu", cores=1)).values()
    assert one.memory_bytes == pytest.approx(3 * pool.memory_bytes, rel=1e-6)


def test_a_gather_moves_what_the_others_have_over_the_slowest_link() -> None:
    spec = ClusterSpec(pools={"main": PoolSpec(device="h100", nodes=4, link_gb_s=100, network_gb_s=80)})
    pool = pools_of(spec)["main"]
    latency = pool.device.collective_s
    assert pool.gather_s(8e9, 1) == 0
    assert pool.gather_s(8e9, 8) == pytest.approx(7e9 / 80e9 + latency)
    assert pool.gather_s(8e9, 4, stride=8) == pytest.approx(3 / 4 * 8e9 / 8e9 + pool.device.network_collective_s)
    assert pool.gather_s(8e9, 32) == pytest.approx(7e9 / 80e9 + 3 / 4 * 1e9 / 8e9 + pool.device.network_collective_s)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA GB200", "gb200"), ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA A100-PCIE-40GB", "a100-40"), ("NVIDIA L40S", "l40s"),
    ],
)  # fmt: skip
def test_a_drivers_name_is_found_in_the_device_list(model: str, name: str) -> None:
    assert _device_of(model) == name
    assert name in device_list().names


def test_a_gpu_that_the_list_lacks_is_named() -> None:
    with pytest.raises(SpecError, match="a Quadro, which the device list does not have"):
        _device_of("Quadro")
