"""ResourceUtilizationLogger: host and container figures, processes, and GPUs through the real nvidia-ml-py.

libnvidia-ml.so.1 is a small C library built here, which answers for four GPUs as a text file tells it to.
Run as a script this file is the process that is watched.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import hooks as hooks_file  # noqa: E402
from hooks import HookDispatcher, ResourceUtilizationLogger, read_cgroup  # noqa: E402


def poll(condition, bound_s=90.0):
    """The first true value of condition()."""
    end = time.monotonic() + bound_s
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    pytest.fail(f"not within {bound_s} s")


@pytest.fixture
def watched():
    """Starts a hook in this process: watched(settings) -> function that takes a log step."""
    started = []

    def start(device="cpu", local_rank=0, rank=0, **settings):
        hook = ResourceUtilizationLogger(log_frequency=1, **{"sample_s": 0.2, **settings})
        hooks = HookDispatcher({"r": hook})
        state = SimpleNamespace(step=1, device=device, local_rank=local_rank, rank=rank)
        hooks.call("before_train", state)
        started.append((hooks, state))
        return lambda: hooks.call("after_step", state)
    yield start
    for hooks, state in started:
        hooks.call("after_train", state)
        assert hooks.call("after_step", state) == {}


# ---- Host and container ------------------------------------------------------------------------------------


def test_the_first_cpu_figure_is_real_and_memory_is_there(watched):
    step = watched()

    def busy():
        sum(i * i for i in range(200_000))
        found = step()
        return found if "system/cpu_percent" in found else None
    found = poll(busy)
    assert 0 < found["system/cpu_percent"] <= 100
    assert 0 < found["system/ram_percent"] < 100 and found["system/ram_used_mb"] > 10
    assert set(found) == {"system/cpu_percent", "system/ram_used_mb", "system/ram_percent"}


def test_only_one_rank_of_a_host_gives_its_figures(watched):
    assert watched(local_rank=1, rank=1)() == {}


def test_container_limits_stand_for_the_hosts(watched, monkeypatch):
    used_s = iter(range(1000))  # one more CPU second at each sample
    monkeypatch.setattr(hooks_file, "read_cgroup", lambda: {
        "memory_bytes": 2**28, "memory_used_bytes": 2**26, "cpu_cores": 0.5,
        "cpu_used_s": float(next(used_s))})
    found = poll(lambda: (lambda f: f if "system/cpu_percent" in f else None)(step())
                 if (step := watched()) else None)
    assert found == {"system/ram_used_mb": 64.0, "system/ram_percent": 25.0, "system/cpu_percent": 100.0}


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_cgroup_v2_takes_the_tightest_limit_on_the_way_up(tmp_path):
    write(tmp_path, {
        "self": "0::/pod/box\n",
        "fs/pod/box/memory.max": "max\n", "fs/pod/box/memory.current": "900\n",
        "fs/pod/box/cpu.max": "max 100000\n",
        "fs/pod/memory.max": "4096\n", "fs/pod/memory.current": "3000\n",
        "fs/pod/memory.stat": "anon 7\ninactive_file 1000\n",
        "fs/pod/cpu.max": "150000 100000\n", "fs/pod/cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
        "fs/memory.max": "8192\n", "fs/memory.current": "1\n", "fs/cpuset.cpus.effective": "0-2,5\n"})
    assert read_cgroup(tmp_path / "fs", tmp_path / "self") == {
        "memory_bytes": 4096, "memory_used_bytes": 2000, "cpu_cores": 1.5, "cpu_used_s": 2.5,
        "cpus": {0, 1, 2, 5}}


def test_cgroup_v1_in_a_container_that_sees_the_hosts_path(tmp_path):
    write(tmp_path, {
        "self": "12:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n3:cpuset:/docker/abc\n1:name=systemd:/x\n"
                "0::/x\n",
        "fs/memory/memory.limit_in_bytes": "1000\n", "fs/memory/memory.usage_in_bytes": "700\n",
        "fs/memory/memory.stat": "cache 5\ntotal_inactive_file 200\n",
        "fs/cpu,cpuacct/cpu.cfs_quota_us": "50000\n", "fs/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "fs/cpu,cpuacct/cpuacct.usage": "3000000000\n", "fs/cpuset/cpuset.cpus": "4-5\n"})
    assert read_cgroup(tmp_path / "fs", tmp_path / "self") == {
        "memory_bytes": 1000, "memory_used_bytes": 500, "cpu_cores": 0.5, "cpu_used_s": 3.0, "cpus": {4, 5}}


def test_cgroup_without_limits_is_empty(tmp_path):
    write(tmp_path, {"self": "0::/\n", "fs/memory.max": "max\n", "fs/cpu.max": "max 100000\n",
                     "v1": "2:cpu:/\n", "v1fs/cpu/cpu.cfs_quota_us": "-1\n",
                     "v1fs/cpu/cpu.cfs_period_us": "100000\n"})
    assert read_cgroup(tmp_path / "fs", tmp_path / "self") == {}
    assert read_cgroup(tmp_path / "v1fs", tmp_path / "v1") == {}
    assert read_cgroup(tmp_path / "fs", tmp_path / "no such file") == {}
    assert isinstance(read_cgroup(), dict)  # whatever this machine has


# ---- Processes ---------------------------------------------------------------------------------------------


class Hoard(torch.utils.data.Dataset):
    """Each worker keeps 40 MB of its own; all read 60 MB that the parent made."""

    def __init__(self):
        self.shared = torch.ones(60 * 2**18)
        self.own = None

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        self.own = torch.ones(40 * 2**18) if self.own is None else self.own
        return self.shared.sum() + self.own[index]


def test_workers_memory_is_in_with_shared_pages_once(watched):
    before = poll(lambda: (lambda f: f if "system/rank3/cpu_percent" in f else None)(step())
                  if (step := watched(rank=3, local_rank=3, per_process=True)) else None)
    assert set(before) == {f"system/rank3/{name}" for name in ("cpu_percent", "rss_mb", "pss_mb")}
    loader = iter(torch.utils.data.DataLoader(Hoard(), batch_size=2, num_workers=2, prefetch_factor=1))
    next(loader), next(loader)
    step = watched(rank=3, local_rank=3, per_process=True)
    grown = poll(lambda: (lambda f: f if f.get("system/rank3/pss_mb", 0) > before["system/rank3/pss_mb"] + 100
                          else None)(step()))
    # Two workers share most pages with their parent: counted once in PSS, three times in RSS.
    assert grown["system/rank3/rss_mb"] > grown["system/rank3/pss_mb"] + 100
    del loader


@pytest.mark.parametrize("wrong", [0, -1.0, True, "1s"])
def test_a_wrong_period_of_samples_is_refused(wrong):
    with pytest.raises(ValueError, match="ResourceUtilizationLogger: sample_s is .*; wanted seconds above 0"):
        ResourceUtilizationLogger(sample_s=wrong)


# ---- GPUs, through nvidia-ml-py ----------------------------------------------------------------------------

NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* Four GPUs, numbered by PCI address. $FAKE_NVML is a text file of lines "<key> <gpu> <value>":
   error <gpu> <code> (-1: in every call), unsupported_power, block (wait while the line is there), reasons,
   pid. */
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } Process;
static const char *uuids[4] = {
    "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-1111-1111-1111-111111111111",
    "GPU-cccccccc-2222-2222-2222-222222222222", "MIG-dddddddd-3333-3333-3333-333333333333"};
static int numbers[4] = {0, 1, 2, 3};
static long long told(const char *key, int gpu, long long otherwise) {
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    char name[64]; int which; long long value, found = otherwise;
    while (file && fscanf(file, "%63s %d %lld", name, &which, &value) == 3)
        if (!strcmp(name, key) && which == gpu) found = value;
    if (file) fclose(file);
    return found;
}
#define GPU int gpu = *(int *)handle; \
    while (told("block", gpu, 0)) usleep(10000); \
    if (told("error", gpu, 0)) return (int)told("error", gpu, 0)
int nvmlInitWithFlags(unsigned int flags) { return (int)told("init", 0, 0); }
int nvmlInit_v2(void) { return (int)told("init", 0, 0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "some error"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    for (int i = 0; i < 4; i++) if (!strcmp(uuid, uuids[i])) { *handle = &numbers[i]; return 0; }
    return 6; /* not found */
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **handle) {
    for (int i = 0; i < 4; i++) {
        char name[32]; snprintf(name, sizeof name, "00000000:%02X:00.0", 0x10 + i);
        if (!strcmp(address, name)) { *handle = &numbers[i]; return 0; }
    }
    return 6;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned int length) {
    GPU; snprintf(text, length, "%s", uuids[gpu]); return 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, Utilization *out) {
    GPU; if (gpu == 3) return 3; /* a MIG instance has none */
    out->gpu = 10 * (gpu + 1); out->memory = 1; return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, Memory *out) {
    GPU; out->total = 80ull << 30; out->used = (unsigned long long)(gpu + 1) << 30;
    out->free = out->total - out->used; return 0;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned int *out) {
    GPU; if (told("unsupported_power", gpu, 0)) return 3;
    *out = 300500; return 0;
}
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned int *out) { GPU; *out = 60 + gpu; return 0; }
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *out) {
    GPU; *out = told("reasons", gpu, 0); return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned int *count, Process *out) {
    GPU; unsigned int room = *count; *count = 2;
    if (room < 2) return 7; /* insufficient size */
    out[0].pid = 1; out[0].used = 5ull << 30; out[0].gi = out[0].ci = 0;
    out[1].pid = told("pid", gpu, 0) ? told("pid", gpu, 0) : getpid(); out[1].used = 256ull << 20;
    out[1].gi = out[1].ci = 0;
    return 0;
}
"""
UUIDS = ["aaaaaaaa-0000-0000-0000-000000000000", "bbbbbbbb-1111-1111-1111-111111111111",
         "cccccccc-2222-2222-2222-222222222222", "dddddddd-3333-3333-3333-333333333333"]


@pytest.fixture(scope="session")
def nvml_folder(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler or sys.platform != "linux":
        pytest.skip("no C compiler for the library that stands in for NVML")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", folder / "nvml.c"],
                   check=True)
    return folder


def visible_devices():
    """CUDA_VISIBLE_DEVICES as CUDA reads it: positions among the four GPUs, in torch's order."""
    names = [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]

    def position(name):
        start = name.partition("-")[2]  # of "GPU-<start of the UUID>"
        return next(i for i, uuid in enumerate(UUIDS) if start and uuid.startswith(start))
    return [int(name) if name.isdigit() else position(name) for name in names]


def device_properties(device):
    """torch.cuda.get_device_properties on that machine."""
    gpu = visible_devices()[torch.device(device).index]
    found = {"pci_domain_id": 0, "pci_bus_id": 0x10 + gpu, "pci_device_id": 0}
    return SimpleNamespace(**found, **({} if os.environ.get("NO_UUID") else {"uuid": UUIDS[gpu]}))


def watched_process(settings, told):
    """Log steps in a process of its own, until every file change that `told` lists shows in the figures."""
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    torch.cuda.get_device_properties = device_properties
    warnings = []
    hooks_file.logger.warning = lambda text, *arguments: warnings.append(text % arguments)
    device = settings.pop("device", f"cuda:{rank}" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu")
    hooks = HookDispatcher({"r": ResourceUtilizationLogger(log_frequency=5, sample_s=0.05, **settings)})
    state = SimpleNamespace(step=0, device=device, rank=rank, local_rank=rank, world_size=world_size)
    hooks.call("before_train", state)
    seen = []
    for content in told:
        if content is not None and rank == 0:
            Path(os.environ["FAKE_NVML"]).write_text(content)
        for state.step in range(1, 41):  # 8 log steps, 0.4 s
            found = hooks.call("after_step", state)
            assert bool(found) <= (state.step % 5 == 0)
            time.sleep(0.01)
        seen.append(hooks.call("after_step", state))
    if any("block" in (content or "") for content in told):
        Path(os.environ["FAKE_NVML"]).write_text("")
    hooks.call("after_train", state)
    if rank == 0:
        print("FOUND", json.dumps({"seen": seen, "warnings": warnings}))
    if world_size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def gpu_run(nvml_folder, tmp_path, visible, told=("",), nproc=1, env={}, **settings):
    """Figures at the end of each phase of `told`, and the warnings."""
    from conftest import run, torchrun
    (tmp_path / "told").write_text("")
    environment = {"CUDA_VISIBLE_DEVICES": visible, "FAKE_NVML": str(tmp_path / "told"), **env}
    if nvml_folder:
        environment["LD_LIBRARY_PATH"] = str(nvml_folder)
    arguments = [__file__, json.dumps(settings), json.dumps(list(told))]
    done = torchrun(nproc, *arguments, env=environment) if nproc > 1 else run([sys.executable, *arguments],
                                                                              env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[5:])
    return found["seen"], found["warnings"]


@pytest.mark.parametrize("visible, gpu, env", [
    ("2,0", 2, {}), ("GPU-bbbb", 1, {}), ("1", 1, {"NO_UUID": "1"})])
def test_the_gpu_is_the_torch_devices_own(nvml_folder, tmp_path, visible, gpu, env):
    (found,), warnings = gpu_run(nvml_folder, tmp_path, visible, env=env, log_per_gpu=True)
    assert warnings == []
    assert {key: value for key, value in found.items() if "gpu" in key} == {
        "system/gpu_util_percent": 10.0 * (gpu + 1), "system/gpu_util_percent_max": 10.0 * (gpu + 1),
        "system/gpu_mem_used_mb": 1024.0 * (gpu + 1), "system/gpu_mem_used_mb_max": 1024.0 * (gpu + 1),
        "system/gpu0/util_percent": 10.0 * (gpu + 1), "system/gpu0/mem_used_mb": 1024.0 * (gpu + 1),
        "system/gpu0/power_w": 300.5, "system/gpu0/temp_c": 60.0 + gpu, "system/gpu0/throttled": 0.0}


def test_a_mig_instance_has_memory_and_no_utilisation(nvml_folder, tmp_path):
    (found,), warnings = gpu_run(nvml_folder, tmp_path, f"MIG-{UUIDS[3]}", log_per_gpu=True)
    assert warnings == [] and found["system/gpu0/mem_used_mb"] == 4096.0
    assert not any("util" in key for key in found)


def test_all_ranks_gpus_and_processes_meet_once_a_log_step(nvml_folder, tmp_path):
    (found,), warnings = gpu_run(nvml_folder, tmp_path, "2,1", nproc=2, log_per_gpu=True, per_process=True)
    assert warnings == []
    assert found["system/gpu_util_percent"] == 25.0 and found["system/gpu_util_percent_max"] == 30.0
    assert found["system/gpu_mem_used_mb"] == 2560.0 and found["system/gpu_mem_used_mb_max"] == 3072.0
    assert (found["system/gpu0/util_percent"], found["system/gpu1/util_percent"]) == (30.0, 20.0)
    for rank in (0, 1):
        assert found[f"system/rank{rank}/gpu_mem_mb"] == 256.0
        assert found[f"system/rank{rank}/pss_mb"] > 20
    assert "system/ram_percent_max" not in found  # one host


def test_unsupported_is_absent_throttling_is_seen_and_other_pids_are_not_ours(nvml_folder, tmp_path):
    (first, second), warnings = gpu_run(
        nvml_folder, tmp_path, "0", ["unsupported_power 0 1\nreasons 0 4\npid 0 77777\n", "reasons 0 64\n"],
        log_per_gpu=True, per_process=True)
    assert warnings == []
    assert "system/gpu0/power_w" not in first and "system/rank0/gpu_mem_mb" not in first
    assert first["system/gpu0/throttled"] == 0.0  # software power cap: ordinary at full load
    assert second["system/gpu0/throttled"] == 1.0 and second["system/gpu0/power_w"] == 300.5


def test_a_card_that_falls_off_the_bus_is_said_once(nvml_folder, tmp_path):
    (before, after), warnings = gpu_run(nvml_folder, tmp_path, "0", ["", "error 0 15\n"], log_per_gpu=True)
    assert before["system/gpu0/util_percent"] == 10.0
    assert not any("gpu" in key for key in after) and "system/ram_percent" in after
    assert len(warnings) == 1 and warnings[0].startswith("ResourceUtilizationLogger: no ")
    assert "of cuda:0: NVMLError_GpuIsLost" in warnings[0]


def test_a_driver_that_hangs_blocks_no_step(nvml_folder, tmp_path):
    # The process would not end its steps, nor the test its wait, if a step waited for the driver.
    (before, hanging), warnings = gpu_run(nvml_folder, tmp_path, "0", ["", "block 0 1\n"])
    assert before["system/gpu_util_percent"] == hanging["system/gpu_util_percent"] == 10.0
    assert warnings == []


def test_no_driver_is_one_warning_and_no_gpu_is_none(nvml_folder, tmp_path):
    (found,), warnings = gpu_run(None, tmp_path, "0", env={"LD_LIBRARY_PATH": "/nowhere"})
    assert len(warnings) == 1
    assert warnings[0].startswith("ResourceUtilizationLogger: no figures of cuda:0: NVMLError")
    assert not any("gpu" in key for key in found) and "system/ram_percent" in found
    (found,), warnings = gpu_run(nvml_folder, tmp_path, "")
    assert warnings == [] and not any("gpu" in key for key in found)
    (found,), warnings = gpu_run(nvml_folder, tmp_path, "", device="xpu:0")
    assert warnings == ["ResourceUtilizationLogger: no figures of xpu:0: LookupError: xpu devices of this"
                        " vendor are not known to NVML"]


if __name__ == "__main__":
    watched_process(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
