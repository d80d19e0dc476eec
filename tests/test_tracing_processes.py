"""tracing.py across processes: forks, data-loader workers of every kind, DDP ranks that wait."""

import collections
import shutil
import statistics

import pytest
from conftest import ROOT, torchrun
from tracing_parts import all_records, environment, files, only, program, ran, records

HEAD = """
import multiprocessing, os, subprocess, sys, threading, time, tracing
from tracing import log_trace_instant, log_trace_scalar, log_trace_span, set_step
"""


# ---- Forks ----

def test_a_forked_child_has_a_file_of_its_own_or_none(tmp_path):
    ran(tmp_path, HEAD + """
tracing.init_structured_logger("forks", "logs", heartbeat_s=0.02)
set_step(9)
with log_trace_span("around the fork"):
    silent = os.fork()
    if silent == 0:
        os._exit(0)
    speaking = os.fork()
    if speaking == 0:
        with log_trace_span("in the child"):
            grandchild = os.fork()
            if grandchild == 0:
                with log_trace_span("in the grandchild"):
                    pass
                sys.exit(0)
            os.waitpid(grandchild, 0)
            time.sleep(0.2)
    else:
        os.waitpid(speaking, 0)
        os.waitpid(silent, 0)
if speaking:
    tracing.close_structured_logger()
""", env=environment(PYTHONWARNINGS="ignore"))
    found = {records(p)[0]["pid"]: records(p) for p in files(tmp_path / "logs")}
    assert len(found) == 3
    parent, = [r for r in found.values() if r[0]["worker"] is None]
    assert [(r["ph"],
             r["name"]) for r in parent if r["ph"] in "BE"] == [("B", "around the fork"),
                                                                ("E", "around the fork")]
    child, = [r for r in found.values() if r[0]["parent"] == parent[0]["pid"]]
    grandchild, = [r for r in found.values() if r[0]["parent"] == child[0]["pid"]]
    assert [(r["ph"],
             r["name"]) for r in child if r["ph"] in "BE"] == [("B", "in the child"), ("E", "in the child")]
    assert only(child, "i", "heartbeat") and not [r for r in child if "step" in r]
    assert [(r["ph"], r["name"]) for r in grandchild if r["ph"] in "BE"][0] == ("B", "in the grandchild")
    assert abs((child[0]["ts"] - child[0]["mono_us"]) - (parent[0]["ts"] - parent[0]["mono_us"])) <= 1


def test_a_fork_while_other_threads_write_locks_nobody_up(tmp_path):
    ran(tmp_path, HEAD + """
tracing.init_structured_logger("forks", "logs", heartbeat_s=0.001, stall_timeout_s=0.5)
stop = threading.Event()
def busy():
    while not stop.is_set():
        with log_trace_span("busy"):
            pass
threads = [threading.Thread(target=busy) for _ in range(3)]
[t.start() for t in threads]
for i in range(60):
    pid = os.fork()
    if pid == 0:
        with log_trace_span("child", args={"i": i}):
            pass
        sys.exit(0) if i % 2 else os._exit(0)
    os.waitpid(pid, 0)
stop.set()
[t.join() for t in threads]
tracing.close_structured_logger()
""", env=environment(PYTHONWARNINGS="ignore"), timeout_s=180)
    children = [records(p) for p in files(tmp_path / "logs") if records(p)[0]["worker"] == "fork"]
    assert sorted(only(r, "B", "child")[0]["args"]["i"] for r in children) == list(range(60))
    assert all([len(only(r, "B")), len(only(r, "E"))] == [1, 1] for r in children)


def test_a_child_that_execs_and_other_programs_leave_the_trace_alone(tmp_path):
    ran(tmp_path, HEAD + """
tracing.init_structured_logger("execs", "logs", heartbeat_s=0)
look = "import os; print(*[os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')])"
pid = os.fork()
if pid == 0:
    os.execv(sys.executable, [sys.executable, "-c", look])
assert os.waitpid(pid, 0)[1] == 0
assert "logs" not in subprocess.check_output([sys.executable, "-c", look], text=True)
subprocess.run([sys.executable, "-c", "import tracing, sys; tracing.log_trace_instant('x'); sys.exit(0)"],
               check=True,
               preexec_fn=lambda: None)
tracing.close_structured_logger()
""", env=environment(PYTHONWARNINGS="ignore"))
    assert len(files(tmp_path / "logs")) == 1


def test_a_signal_to_a_forked_child_does_not_speak_for_its_parent(tmp_path):
    ran(tmp_path, HEAD + """
import signal
tracing.init_structured_logger("signals", "logs", heartbeat_s=0)
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(write, b"x")
    time.sleep(600)
os.read(read, 1)
os.kill(pid, signal.SIGTERM)
assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
tracing.close_structured_logger()
""", env=environment(PYTHONWARNINGS="ignore"))
    assert [p.suffix for p in (tmp_path / "logs").iterdir()] == [".jsonl"]


def test_ranks_that_one_parent_forks_begin_traces_of_their_own(tmp_path):
    ran(tmp_path, HEAD + """
def rank_main(rank):
    tracing.init_structured_logger("training", "logs", rank=rank, heartbeat_s=0)
    with log_trace_span("step"):
        pass
    tracing.close_structured_logger()

tracing.init_structured_logger("launcher", "logs", heartbeat_s=0)
context = multiprocessing.get_context("fork")
ranks = [context.Process(target=rank_main, args=(rank,)) for rank in range(2)]
[r.start() for r in ranks], [r.join() for r in ranks]
tracing.close_structured_logger()
""", env=environment(PYTHONWARNINGS="ignore"))
    headers = [records(p)[0] for p in files(tmp_path / "logs")]
    assert [(h["source"], h["rank"], h["worker"]) for h in headers] == [
        ("launcher", 0, None), ("training", 0, None), ("training", 1, None)]


# ---- Data loaders ----

LOADER = HEAD + """
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

class Squares(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        log_trace_scalar({"index": index})
        return torch.tensor(index ** 2)

class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        return (torch.tensor(n) for n in range(first, 12, every))

def mine(worker_id):
    assert get_worker_info().id == worker_id
    log_trace_instant("my own init")

def main(method, workers, persistent, kind):
    tracing.init_structured_logger("training", "logs", rank=3, heartbeat_s=0.05)
    loader = DataLoader(Squares() if kind == "map" else Stream(), batch_size=None if kind == "single" else 2,
                        num_workers=workers, worker_init_fn=tracing.trace_worker_init(mine),
                        multiprocessing_context=method if workers else None, persistent_workers=persistent)
    for epoch in range(2):
        set_step(epoch)
        with log_trace_span("epoch"):
            total = sum(int(batch.sum()) for batch in loader)
        assert total == (sum(n ** 2 for n in range(12)) if kind == "map" else sum(range(12)))
    tracing.close_structured_logger()

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "persistent", sys.argv[4])
"""


@pytest.mark.parametrize("method, workers, persistent, kind", [
    ("fork", 0, False, "map"), ("fork", 2, False, "map"), ("fork", 2, True, "map"), ("spawn", 2, True, "map"),
    ("forkserver", 2, False, "map"), ("fork", 2, False, "stream"),
    pytest.param("spawn", 2, False, "map", marks=pytest.mark.long),
    pytest.param("forkserver", 2, True, "map", marks=pytest.mark.long),
    pytest.param("spawn", 2, True, "stream", marks=pytest.mark.long),
    pytest.param("fork", 2, False, "single", marks=pytest.mark.long)])
def test_every_batch_of_every_worker_is_a_fetch(tmp_path, method, workers, persistent, kind):
    pytest.importorskip("torch")
    done = program(tmp_path, LOADER, method, workers, "persistent" if persistent else "", kind,
                   env=environment(PYTHONWARNINGS="ignore"), timeout_s=180)
    assert done.returncode == 0, done.stderr
    found = [records(p) for p in files(tmp_path / "logs")]
    parent, = [r for r in found if r[0]["worker"] is None]
    children = [r for r in found if r[0]["worker"] is not None]
    assert len(children) == (0 if not workers else workers if persistent else 2 * workers)
    assert {r[0]["worker"] for r in children} == set(range(workers))
    assert {(r[0]["rank"], r[0]["source"]) for r in found} == {(3, "training")}
    assert {r[0]["parent"] for r in children} <= ({parent[0]["pid"]} if method != "forkserver" else {
        r[0]["parent"] for r in children})
    everything = [r for part in found for r in part]
    fetches = only(everything, "B", "fetch")
    batches = {"map": 12, "stream": 12 + 2 * max(workers, 1),
               "single": 24 + 2 * workers}[kind]   # and each stream's end
    assert len(fetches) == len(only(everything, "E", "fetch")) == batches
    assert bool(only(parent, "B", "fetch")) == (workers == 0)
    assert not [r for r in only(everything, "E") if "err" in r]
    assert len(only(everything, "i", "my own init")) == len(children)
    if kind == "map":
        assert sorted(r["args"]["index"] for r in only(everything, "C")) == sorted(2 * list(range(12)))
    assert all(only(r, "i", "process_end") for r in found)


def test_trace_workers_off_and_tracing_off(tmp_path):
    pytest.importorskip("torch")
    for settings in ('heartbeat_s=0.05, trace_workers=False', 'enable=False'):
        text = LOADER.replace('heartbeat_s=0.05', settings)
        done = program(tmp_path, text, "fork", 2, "", "map", env=environment(PYTHONWARNINGS="ignore"))
        assert done.returncode == 0, done.stderr
    path, = files(tmp_path / "logs")
    assert not only(records(path), name="fetch") and len(only(records(path), "B", "epoch")) == 2


def test_workers_of_more_than_64_ranks_are_not_traced_unless_asked(tmp_path):
    text = HEAD + """
tracing.init_structured_logger("many", "logs", heartbeat_s=0{})
if os.fork() == 0:
    log_trace_instant("child")
    os._exit(0)
os.wait()
tracing.close_structured_logger()
"""
    big = environment(RANK=0, WORLD_SIZE=65, PYTHONWARNINGS="ignore")
    ran(tmp_path, text.format(""), env=big)
    assert len(files(tmp_path / "logs")) == 1
    ran(tmp_path, text.format(", trace_workers=True"), env=big)
    assert len(files(tmp_path / "logs")) == 3


def test_a_worker_that_waits_for_its_parent_has_not_stalled(tmp_path):
    pytest.importorskip("torch")
    text = LOADER.replace("heartbeat_s=0.05", "heartbeat_s=0.05, stall_timeout_s=0.2").replace(
        "        set_step(epoch)\n", "        set_step(epoch)\n        time.sleep(1.5)\n")
    done = program(tmp_path, text, "fork", 2, "persistent", "map", env=environment(PYTHONWARNINGS="ignore"))
    assert done.returncode == 0, done.stderr
    for path in files(tmp_path / "logs"):
        found = records(path)
        assert bool(only(found, "i", "stacks")) == (found[0]["worker"] is None)


# ---- Ranks that wait for each other ----

DDP = """
import os, sys, time, torch, tracing
from torch.autograd.graph import register_multi_grad_hook

def tell_when_ready(loss, span):
    loss.register_hook(lambda grad: torch.autograd.Variable._execution_engine.queue_callback(span.ready))

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context, x, seconds):
        context.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(context, grad):
        time.sleep(context.seconds)
        return grad, None

torch.distributed.init_process_group("gloo")
rank, public = torch.distributed.get_rank(), sys.argv[1] == "public"
tracing.init_structured_logger("training", "logs")
layers = [torch.nn.Linear(32, 32) for _ in range(4)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.ModuleList(layers), bucket_cap_mb=0.005)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
span = None
if public:
    register_multi_grad_hook(list(model.parameters()), lambda grads: span.ready())

def forward(self, x, slow_layer, seconds):
    for i, layer in enumerate(self):
        x = Slow.apply(layer(x), seconds if i == slow_layer else 0.0)
    return x
torch.nn.ModuleList.forward = forward

for step in range(24):
    tracing.set_step(step)
    slow_rank, slow_layer = step % 2, step // 2 % 4
    loss = model(torch.ones(4, 32), slow_layer, 0.06 if rank == slow_rank else 0.0).square().mean()
    with tracing.log_trace_span("backward", sync=True) as span:
        if not public:
            tell_when_ready(loss, span)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
tracing.close_structured_logger()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
os._exit(0)   # gloo may abort while the interpreter ends
"""


@pytest.mark.parametrize("hook", ["engine", "public"])
def test_the_slow_rank_in_backward_has_the_largest_own_time(tmp_path, hook):
    pytest.importorskip("torch")
    shutil.copy(ROOT / "tracing.py", tmp_path / "tracing.py")
    (tmp_path / "program.py").write_text(DDP)
    done = torchrun(2, "program.py", hook, cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    own_us, wall_us = collections.defaultdict(dict), collections.defaultdict(dict)
    for path in files(tmp_path / "logs"):
        found = records(path)
        rank = found[0]["rank"]
        assert all(r["sync"] is True for r in only(found, "B", "backward"))
        begins = {r["step"]: r["ts"] for r in only(found, "B", "backward")}
        for ready in only(found, "i", "ready"):
            assert ready["args"] == {"span": "backward"}
            own_us[ready["step"]][rank] = ready["ts"] - begins[ready["step"]]
        for end in only(found, "E", "backward"):
            wall_us[end["step"]][rank] = end["dur"]
    assert sorted(own_us) == list(range(24)) and all(len(ranks) == 2 for ranks in own_us.values())
    named = [max(own_us[step], key=own_us[step].get) == step % 2 for step in range(1, 24)]
    assert sum(named) >= 22, own_us   # one step may be disturbed by a loaded machine
    for step in range(24):
        assert own_us[step][step % 2] >= 60_000 and wall_us[step][1 - step % 2] >= 50_000
    other = statistics.median(own_us[step][1 - step % 2] for step in range(24))
    assert other < 40_000, "the waiting rank's own time leaves the wait out"


def test_the_docstrings_loop_is_the_one_that_is_tested():
    docstring = (ROOT / "tracing.py").read_text().split('"""')[1]
    for line in ("loss.register_hook(lambda grad: torch.autograd.Variable._execution_engine.queue_callback(",
                 "register_multi_grad_hook(list(model.parameters()), lambda grads: span.ready())"):
        assert line in docstring and line in DDP
