"""tracing.py's promise that nothing is lost and nothing breaks: kills, short writes, full disks, rotation."""

import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

import pytest
from conftest import ROOT, torchrun
from tracing_parts import all_records, environment, files, only, program, ran, records, wait_for

HEAD = """
import os, sys, threading, time, tracing
from tracing import log_trace_instant, log_trace_scalar, log_trace_span, set_step
"""


# ---- Kills ----

KILLED = HEAD + """
# Says which numbers have been written, after the call has returned, on a pipe that outlives the kill.
tracing.init_structured_logger("killed", "logs", max_file_size_mb=float(sys.argv[1]), heartbeat_s=0.01)

def deeper(thread, number, depth):
    with log_trace_span("deep", args={"n": number, "depth": depth}):
        if depth:
            deeper(thread, number, depth - 1)

def work(thread):
    number = 0
    while True:
        number += 1
        set_step(number)
        with log_trace_span("work", args={"thread": thread, "n": number}):
            log_trace_scalar({f"scalar{thread}": number})
            deeper(thread, number, number % 4)
        os.write(1, f"{thread} {number}\\n".encode())

for thread in (1, 2):
    threading.Thread(target=work, args=(thread,), daemon=True).start()
work(0)
"""


def kill_at_a_random_moment(folder, seconds, rotate_mb):
    """Run KILLED and end it with SIGKILL; returns what it said it had written: {thread: last number}."""
    process = subprocess.Popen([sys.executable, "program.py", str(rotate_mb)], cwd=folder,
                               stdout=subprocess.PIPE,
                               env={**os.environ, **environment()})
    os.set_blocking(process.stdout.fileno(), True)
    killer = threading.Timer(seconds, process.kill)
    first = process.stdout.readline()
    killer.start()
    said = first + process.stdout.read()
    process.wait(60)
    killer.join(60)
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL
    last = {}
    for line in said.decode().splitlines():
        if len(line.split()) == 2:
            thread, number = line.split()
            last[thread] = max(last.get(thread, 0), int(number))
    return last


def what_a_kill_left(folder):
    """All records, oldest file first. Only the newest may end in half a line; each begins with its header."""
    base, = folder.glob("*.jsonl")
    parts = sorted(folder.glob("*.jsonl.*"), key=lambda path: -int(path.suffix[1:])) + [base]
    found = []
    for path in parts:
        lines = path.read_bytes().split(b"\n")
        torn = lines.pop()
        assert not torn or path == base
        found += [json.loads(line) for line in lines]
        assert json.loads(lines[0])["ph"] == "M"
    return found


def written(found, ended):
    numbers = collections.defaultdict(set)
    for record in found:
        if record["ph"] == "B" and record["name"] == "work":
            numbers[str(record["args"]["thread"])].add(record["args"]["n"])
        if record["ph"] == "C":
            (name, number), = record["args"].items()
            ended[name[-1]].add(number)
    return numbers


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.long)])
def test_a_kill_takes_no_record_whose_call_has_returned(tmp_path, kills):
    shutil.copy(ROOT / "tracing.py", tmp_path / "tracing.py")
    (tmp_path / "program.py").write_text(KILLED)
    moments = random.Random(kills)
    for _ in range(kills):
        said = kill_at_a_random_moment(tmp_path, moments.uniform(0, 0.15), rotate_mb=500)
        assert said
        ended = collections.defaultdict(set)
        numbers = written(what_a_kill_left(tmp_path / "logs"), ended)
        for thread, last in said.items():
            assert numbers[thread] >= set(range(1, last + 1)), f"thread {thread} lost begins up to {last}"
            assert ended[thread] >= set(range(1, last + 1)), f"thread {thread} lost scalars up to {last}"
        shutil.rmtree(tmp_path / "logs")


def test_kills_during_rotation_keep_the_window_whole(tmp_path):
    shutil.copy(ROOT / "tracing.py", tmp_path / "tracing.py")
    (tmp_path / "program.py").write_text(KILLED)
    moments = random.Random(5)
    for _ in range(10):
        said = kill_at_a_random_moment(tmp_path, moments.uniform(0.1, 0.3), rotate_mb=0.02)
        ended = collections.defaultdict(set)
        written(what_a_kill_left(tmp_path / "logs"), ended)
        assert any(ended.values())
        for thread, last in said.items():   # from the oldest that is kept on, none is missing
            kept = ended[thread]
            assert not kept or set(range(min(kept), last + 1)) <= kept
        shutil.rmtree(tmp_path / "logs")


# ---- Rotation ----

ROTATES = HEAD + """
tracing.init_structured_logger("rotates", "logs", max_file_size_mb=0.02, backup_count=3, heartbeat_s=0,
                               stall_timeout_s=0)
with log_trace_span("epoch"):
    for step in range(int(sys.argv[1])):
        set_step(step)
        with log_trace_span("step"):
            log_trace_scalar({"n": step})
        if len(sys.argv) > 2:
            time.sleep(float(sys.argv[2]))
tracing.close_structured_logger()
"""


def test_rotation_keeps_header_open_spans_and_backup_count_files(tmp_path):
    ran(tmp_path, ROTATES, "2000")
    base, = files(tmp_path / "logs")
    names = sorted(p.name for p in (tmp_path / "logs").iterdir())
    assert names == [base.name] + [f"{base.name}.{i}" for i in (1, 2, 3)]
    scalars, parts = [], []
    for path in [f"{base}.3", f"{base}.2", f"{base}.1", base]:
        assert os.path.getsize(path) < 21_000
        found = records(path)
        header, epoch = found[0], found[1]
        parts.append(header["part"])
        assert header["continues"] == base.name
        assert (epoch["ph"], epoch["name"]) == ("B", "epoch") and epoch["ts"] < header["ts"]
        assert only(found, "D", "step") or not only(found, "B", "step")
        scalars += [r["args"]["n"] for r in only(found, "C")]
    assert parts == list(range(parts[0], parts[0] + 4))
    assert scalars == list(range(scalars[0], 2000))
    assert only(records(base), "E", "epoch")


def test_backup_count_0_keeps_one_file(tmp_path):
    ran(tmp_path, ROTATES.replace("backup_count=3", "backup_count=0"), "2000")
    base, = (tmp_path / "logs").iterdir()
    assert records(base)[0]["part"] > 1 and only(records(base), "E", "epoch")


def follow(path, process):
    """What a reader gets that holds the file open and goes on in the next one at its end, as tail -F does."""
    found, finished = [], False
    file = open(path, "rb")
    while True:
        before = process.poll() is not None
        line = file.readline()
        if line.endswith(b"\n"):
            found.append(json.loads(line))
            continue
        assert not line or not before, "half a line at the end"
        file.seek(-len(line), os.SEEK_CUR)
        if os.stat(path).st_ino != os.fstat(file.fileno()).st_ino:
            rest = file.read()   # the old file is complete by now
            found += [json.loads(text) for text in rest.splitlines()]
            file.close()
            file = open(path, "rb")
        elif before and finished:
            file.close()
            return found
        finished = before


def test_a_reader_that_follows_misses_nothing(tmp_path):
    shutil.copy(ROOT / "tracing.py", tmp_path / "tracing.py")
    (tmp_path / "program.py").write_text(ROTATES)
    # A file lives for half a second: a reader that is starved for as long misses one, as tail -F would.
    process = subprocess.Popen([sys.executable, "program.py", "900", "0.005"], cwd=tmp_path)
    try:
        path = wait_for(lambda: files(tmp_path / "logs"))[0]
        wait_for(lambda: path.stat().st_size)
        found = follow(path, process)
    finally:
        process.kill()
        process.wait(60)
    parts = [r["part"] for r in only(found, "M")]
    assert parts == list(range(len(parts))) and len(parts) > 5
    assert [r["args"]["n"] for r in only(found, "C")] == list(range(900))


def test_a_rotation_that_fails_goes_on_in_the_old_file(tmp_path, faulty):
    ran_with_faults(tmp_path, faulty, ROTATES, "1000", FAULT_OPEN="24", FAULT_PATH=".next")
    base, = files(tmp_path / "logs")
    assert [r["args"]["n"] for r in only(records(base), "C")] == list(range(1000))


# ---- Faults of the operating system: a library in front of libc's write and open ----

FAULTS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* FAULT_PATH: part of the name of the files meant. While the file FAULT_WHILE exists, or always without it:
   FAULT_WRITE: errno of every write, after FAULT_TORN bytes of it; FAULT_SHORT: every n-th write is short;
   FAULT_OPEN: errno of every open that creates; FAULT_SLOW_MS: how long a write takes. */

static int number(const char *name) { const char *text = getenv(name); return text ? atoi(text) : 0; }

static int active(void) {
    const char *flag = getenv("FAULT_WHILE");
    return !flag || access(flag, F_OK) == 0;
}

static int meant(int fd) {
    char link[64], path[4096];
    const char *part = getenv("FAULT_PATH");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return strstr(path, part ? part : ".jsonl") != NULL;
}

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    static int calls;
    if (!real) real = dlsym(RTLD_NEXT, "write");
    int error = number("FAULT_WRITE"), every = number("FAULT_SHORT"), slow_ms = number("FAULT_SLOW_MS");
    if ((error || every || slow_ms) && meant(fd) && active()) {
        int torn = number("FAULT_TORN");
        if (slow_ms) usleep(slow_ms * 1000);
        if (error && torn && size > (size_t)torn) {
            static int half;
            half = !half;
            if (half) return real(fd, data, torn);
        }
        if (error) { errno = error; return -1; }
        if (every && size > 1 && __sync_fetch_and_add(&calls, 1) % every == 0)
            return real(fd, data, size / 2);
    }
    return real(fd, data, size);
}

static int refused(const char *path, int flags) {
    const char *part = getenv("FAULT_PATH");
    int error = number("FAULT_OPEN");
    if (error && (flags & O_CREAT) && strstr(path,
                                             part ? part : ".jsonl") && active()) { errno = error; return 1; }
    return 0;
}

int open(const char *path, int flags, ...) {
    static int (*real)(const char *, int, ...);
    va_list list; va_start(list, flags); int mode = va_arg(list, int); va_end(list);
    if (!real) real = dlsym(RTLD_NEXT, "open");
    return refused(path, flags) ? -1 : real(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    static int (*real)(const char *, int, ...);
    va_list list; va_start(list, flags); int mode = va_arg(list, int); va_end(list);
    if (!real) real = dlsym(RTLD_NEXT, "open64");
    return refused(path, flags) ? -1 : real(path, flags, mode);
}
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """The path of the library, built once."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler and LD_PRELOAD")
    folder = tmp_path_factory.mktemp("faults")
    (folder / "faults.c").write_text(FAULTS)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", folder / "faults.so", folder / "faults.c",
                    "-ldl"], check=True)
    return folder / "faults.so"


def ran_with_faults(tmp_path, faulty, text, *args, python=sys.executable, **variables):
    """Run a program under the library; it must end well. Returns what it said on stderr."""
    done = program(tmp_path, text, *args, env=environment(LD_PRELOAD=faulty, **variables), python=python)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stderr


DISK = HEAD + """
# Three phases; while the file "fault" exists, the library makes trouble.
tracing.init_structured_logger("disk", "logs", heartbeat_s=0, stall_timeout_s=0)

def phase(first):
    for n in range(first, first + 100):
        with log_trace_span("step", args={"n": n}):
            log_trace_scalar({"n": n})

with log_trace_span("epoch"):
    phase(0)
    open("fault", "w").close()
    phase(100)
    os.unlink("fault")
    phase(200)
tracing.close_structured_logger()
"""


@pytest.mark.parametrize("error", [28, 5, 30, 122])   # ENOSPC, EIO, EROFS, EDQUOT
@pytest.mark.parametrize("torn", [0, 30])
def test_a_disk_that_fails_for_a_while(tmp_path, faulty, error, torn):
    said = ran_with_faults(tmp_path, faulty, DISK, FAULT_WRITE=error, FAULT_TORN=torn,
                           FAULT_WHILE=tmp_path / "fault")
    assert said.count("\n") == 1 and os.strerror(error) in said and "Training goes on" in said
    lines = files(tmp_path / "logs")[0].read_text().splitlines()
    whole = []
    for line in lines:
        try:
            whole.append(json.loads(line))
        except ValueError:
            assert torn and len(line) <= torn, f"glued: {line}"
    assert [r["args"]["n"] for r in only(whole, "C")] == [n for n in range(300) if not 100 <= n < 200]
    lost = sum(r.get("lost", 0) for r in whole)
    assert lost == 300, "a begin, scalars and an end for each of the hundred"
    assert only(whole, "E", "epoch") and only(whole, "i", "process_end")
    assert only(whole, "D", "step")[-1]["at"] and (len(lines) > len(whole)) == bool(torn)


@pytest.mark.parametrize("threads", [1, 4])
def test_short_writes_are_completed(tmp_path, faulty, threads):
    text = HEAD + f"""
tracing.init_structured_logger("short", "logs", heartbeat_s=0.01)

def work(thread):
    for n in range(500):
        with log_trace_span("work", args={{"thread": thread, "n": n}}):
            pass

threads = [threading.Thread(target=work, args=(i,)) for i in range({threads})]
[t.start() for t in threads], [t.join() for t in threads]
tracing.close_structured_logger()
"""
    assert not ran_with_faults(tmp_path, faulty, text, FAULT_SHORT=3)
    found = all_records(tmp_path / "logs")
    assert len(only(found, "B")) == len(only(found, "E")) == 500 * threads


@pytest.mark.parametrize("error, path", [(24, ".jsonl"), (30, ".jsonl"), (28, ".stacks"), (24, ".stacks")])
def test_a_file_that_cannot_be_opened_is_opened_later(tmp_path, faulty, error, path):
    text = HEAD + """
open("fault", "w").close()
tracing.init_structured_logger("opens", "logs", heartbeat_s=0.05)
with log_trace_span("lost"):
    os.unlink("fault")
    while not [f for f in (os.listdir("logs") if os.path.isdir("logs") else []) if "jsonl" in f]:
        with log_trace_span("trying"):
            time.sleep(0.05)
    with log_trace_span("found"):
        pass
tracing.close_structured_logger()
"""
    said = ran_with_faults(tmp_path, faulty, text, FAULT_OPEN=error, FAULT_PATH=path,
                           FAULT_WHILE=tmp_path / "fault")
    assert said.count("Training goes on") == 1 and os.strerror(error) in said
    found = all_records(tmp_path / "logs")
    assert only(found, "E", "found") and only(found, "B", "lost") and only(found, "i", "process_end")


def test_a_slow_disk_is_named_once(tmp_path, faulty):
    text = HEAD + """
tracing.init_structured_logger("slow", "logs", heartbeat_s=0.05)
open("fault", "w").close()
time.sleep(5)
os.unlink("fault")
tracing.close_structured_logger()
"""
    said = ran_with_faults(tmp_path, faulty, text, FAULT_SLOW_MS=1200, FAULT_WHILE=tmp_path / "fault")
    assert said.count("\n") == 1 and "a write to" in said and "faster disk" in said


def test_a_folder_that_is_removed_is_made_again(tmp_path):
    done = program(tmp_path, HEAD + """
import shutil
tracing.init_structured_logger("removed", "logs", heartbeat_s=0.1)
with log_trace_span("epoch"):
    with log_trace_span("before"):
        pass
    time.sleep(0.5)
    shutil.rmtree("logs")
    for _ in range(10):
        log_trace_instant("gone")
    while not os.path.isdir("logs") or not [f for f in os.listdir("logs") if f.endswith(".jsonl")]:
        time.sleep(0.01)
    with log_trace_span("after"):
        pass
tracing.close_structured_logger()
""", env=environment())
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and "was removed" in done.stderr
    found = all_records(tmp_path / "logs")
    assert found[0]["continues"] and [r["name"] for r in only(found, "B")] == ["epoch", "after"]
    assert sum(r.get("lost", 0) for r in found) >= 10 and only(found, "E", "epoch")


def test_a_real_disk_that_is_full(tmp_path):
    """A tmpfs of 64 kB, where it may be mounted."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mount], capture_output=True,
                          text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {done.stderr.strip()}")
    try:
        done = program(tmp_path, HEAD + """
tracing.init_structured_logger("full", "small/logs", heartbeat_s=0)
for n in range(2000):
    with log_trace_span("step", args={"n": n}):
        pass
open("small/full").close() if os.path.exists("small/full") else None
name = "small/logs/" + [f for f in os.listdir("small/logs") if f.endswith(".jsonl")][0]
size = os.path.getsize(name)
os.system("mount -o remount,size=1m small")
with log_trace_span("room again"):
    pass
tracing.close_structured_logger()
""", env=environment())
        assert done.returncode == 0 and done.stderr.count("\n") == 1 and "No space left" in done.stderr
        path, = files(mount / "logs")
        whole = []
        for line in path.read_text().splitlines():
            try:
                whole.append(json.loads(line))
            except ValueError:
                assert line.count('"ph"') <= 1, f"glued: {line}"
        numbers = [r["args"]["n"] for r in only(whole, "B", "step")]
        assert numbers == list(range(len(numbers))) and 100 < len(numbers) < 2000
        again, = only(whole, "B", "room again")
        assert again["lost"] >= 2 * (2000 - len(numbers)) - 1 and only(whole, "i", "process_end")
    finally:
        subprocess.run(["umount", mount], check=True)


TWO_RANKS = """
import os, sys, torch, tracing
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()

def train(folder, faulty):
    torch.manual_seed(0)
    tracing.init_structured_logger("train", folder, heartbeat_s=0.05)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    losses = []
    for step in range(60):
        tracing.set_step(step)
        if faulty and rank == 1 and step == 20:
            open("fault", "w").close()
        if faulty and rank == 1 and step == 40:
            os.unlink("fault")
        with tracing.log_trace_span("step"):
            loss = model(torch.full((4, 8), float(rank + step))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tracing.log_trace_scalar({"loss": loss.detach()})
        losses.append(loss.item())
    tracing.close_structured_logger()
    return losses

assert train("good", False) == train("bad", True)
open(f"rank{rank} has the same losses", "w").close()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
os._exit(0)   # gloo may abort while the interpreter ends
"""


def test_one_rank_of_two_whose_disk_fails_trains_on_with_the_same_losses(tmp_path, faulty):
    pytest.importorskip("torch")
    shutil.copy(ROOT / "tracing.py", tmp_path / "tracing.py")
    (tmp_path / "program.py").write_text(TWO_RANKS)
    done = torchrun(2, "program.py", cwd=tmp_path, env={
        **environment(), "FAULT_WRITE": "28", "FAULT_TORN": "20", "FAULT_PATH": "rank00001",
        "FAULT_WHILE": "fault", "LD_PRELOAD": str(faulty)})
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("rank* has the same losses"))) == 2
    assert done.stderr.count("Training goes on") == 1 and "rank 1" in done.stderr
    for path in files(tmp_path / "good"):
        assert not [r for r in records(path) if "lost" in r] and len(only(records(path), "E", "step")) == 60
    zero, one = files(tmp_path / "bad")
    assert len(only(records(zero), "E", "step")) == 60
    whole = [json.loads(line) for line in one.read_text().splitlines() if line.endswith("}")]
    assert [r["step"] for r in only(whole, "E", "step")] == [s for s in range(60) if not 20 <= s < 40]
    assert sum(r.get("lost", 0) for r in whole) >= 60


# ---- Many processes ----

MANY = HEAD + """
ranks, folders = int(sys.argv[1]), sys.argv[2:]
read, write = os.pipe()
for rank in range(ranks):
    if os.fork() == 0:
        os.close(write)
        os.read(read, 1)   # all begin when the parent lets go of the pipe
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
        tracing.init_structured_logger("many", folders[rank % len(folders)], heartbeat_s=0, stall_timeout_s=0)
        for n in range(50):
            with log_trace_span("step", args={"n": n}):
                pass
        tracing.close_structured_logger()
        os._exit(0)
os.close(write)
print(sum(os.wait()[1] != 0 for _ in range(ranks)))
"""


@pytest.mark.parametrize("folders", [["one"], ["node0", "node1"], ["/dev/shm"]])
@pytest.mark.parametrize("ranks", [64, 300])
def test_many_processes_at_once(tmp_path, folders, ranks):
    if folders == ["/dev/shm"] and not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir=folders[0] if folders == ["/dev/shm"] else tmp_path) as logs:
        at = [os.path.join(logs, folder.strip("/")) for folder in folders]
        assert ran(tmp_path, MANY, ranks, *at, env=environment()) == "0\n"
        found = {path: records(path) for path in files(logs)}
        assert len(found) == ranks and {r[0]["rank"] for r in found.values()} == set(range(ranks))
        assert all(len(only(r, "B")) == len(only(r, "E")) == 50 for r in found.values())
        for path, rank in [(p, r[0]["rank"]) for p, r in found.items()]:
            folder = os.path.relpath(path.parent, logs).split(os.sep)
            assert folder[0] == folders[rank % len(folders)].strip("/").split(os.sep)[0]
            assert ("ranks" in str(path.parent.name)) == (ranks > 256)


def test_two_jobs_with_the_same_folder_and_source(tmp_path):
    for _ in range(2):
        ran(tmp_path, MANY, 4, "logs", env=environment())
    pids = [records(path)[0]["pid"] for path in files(tmp_path / "logs")]
    assert len(pids) == len(set(pids)) == 8
