"""tracing.py's signs of life: heartbeats, stacks, how a process ended, and whose faulthandler it is."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from tracing_parts import all_records, environment, files, only, program, ran, records, wait_for

HEAD = """
import ctypes, faulthandler, os, signal, sys, threading, time, tracing
from tracing import log_trace_instant, log_trace_scalar, log_trace_span, set_step
"""


def started(tmp_path, text, **options):
    """Start a program and return (process, path of its trace) as soon as the trace is there."""
    import shutil
    shutil.copy(ROOT / "tracing.py", tmp_path / "tracing.py")
    (tmp_path / "program.py").write_text(text)
    process = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path,
                               env={**os.environ, **environment()},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    try:
        return process, wait_for(lambda: [p for p in files(tmp_path / "logs") if p.stat().st_size])[0]
    except BaseException:
        process.kill()
        raise


def ended(process):
    """Kill a process that a test has started, whatever has become of it."""
    process.kill()
    return process.communicate(timeout=60)


def stacks_file(path):
    return path.with_name(path.name[:-len(".jsonl")] + ".stacks.txt")


# ---- Heartbeats and stalls ----

def test_heartbeats_carry_memory_idle_time_and_losses(tmp_path):
    ran(tmp_path, HEAD + """
tracing.init_structured_logger("beats", "logs", heartbeat_s=0.05)
time.sleep(0.5)
tracing.close_structured_logger()
""")
    beats = only(all_records(tmp_path / "logs"), "i", "heartbeat")
    assert len(beats) >= 2 and all(r["args"].keys() == {"rss_mb", "idle_s", "lost"} for r in beats)
    assert beats[-1]["args"]["rss_mb"] > 1 and beats[-1]["args"]["lost"] == 0
    idle = [r["args"]["idle_s"] for r in beats]
    assert idle == sorted(idle) and idle[0] < idle[-1]


STALL = HEAD + """
tracing.init_structured_logger("stall", "logs", heartbeat_s=0.1, stall_timeout_s=0.5)

def stuck_here():
    time.sleep(600)

threading.Thread(target=threading.Event().wait, name="a helper", daemon=True).start()
with log_trace_span("step"):
    with log_trace_span("data"):
        stuck_here()
"""


def test_a_stall_writes_all_stacks_once_and_again_when_it_has_doubled(tmp_path):
    process, path = started(tmp_path, STALL)
    try:
        wait_for(lambda: len(only(records(path, torn_end=True), "i", "stacks")) >= 3)
    finally:
        ended(process)
    dumps = only(records(path, torn_end=True), "i", "stacks")
    seconds = [d["args"]["seconds"] for d in dumps]
    assert all(later >= 2 * earlier for earlier, later in zip(seconds, seconds[1:]))
    threads = {t["name"]: t["stack"] for t in dumps[0]["args"]["threads"]}
    assert threads["MainThread"][0].endswith(":stuck_here") and "a helper" in threads
    assert "tracing-heartbeat" not in threads
    assert dumps[0]["args"]["why"] == "stall"


def test_what_was_seen_to_take_long_may_take_long_again(tmp_path):
    ran(tmp_path, HEAD + """
tracing.init_structured_logger("patient", "logs", heartbeat_s=0.05, stall_timeout_s=0.3)
for step in range(2):
    set_step(step)
    with log_trace_span("evaluate"):
        time.sleep(1.5)
tracing.close_structured_logger()
""")
    dumps = only(all_records(tmp_path / "logs"), "i", "stacks")
    assert dumps and {d["step"] for d in dumps} == {0}


def test_no_stall_while_records_come(tmp_path):
    ran(tmp_path, HEAD + """
tracing.init_structured_logger("busy", "logs", heartbeat_s=0.05, stall_timeout_s=20)
with log_trace_span("epoch"):
    for _ in range(30):
        log_trace_instant("tick")
        time.sleep(0.02)
tracing.close_structured_logger()
""")
    assert not only(all_records(tmp_path / "logs"), "i", "stacks")


GIL = HEAD + """
tracing.init_structured_logger("gil", "logs", heartbeat_s=0.2, stall_timeout_s=0.5)

def hung_in_c():
    ctypes.PyDLL(None).usleep(3_000_000)   # PyDLL keeps the GIL

with log_trace_span("step"):
    hung_in_c()
time.sleep(1)
tracing.close_structured_logger()
"""


def test_c_code_that_holds_the_gil_is_seen_by_faulthandlers_timer(tmp_path):
    ran(tmp_path, GIL)
    path, = files(tmp_path / "logs")
    text = stacks_file(path).read_text()
    assert "Timeout" in text and "hung_in_c" in text
    noted = [d["args"] for d in only(records(path), "i", "stacks") if "file" in d["args"]]
    assert noted and noted[0]["file"] == stacks_file(path).name and noted[0]["offset"] == 0
    idle = [r["args"]["idle_s"] for r in only(records(path), "i", "heartbeat")]
    assert max(idle) > 2 or len(idle) < 15


def test_the_timer_is_armed_before_the_first_heartbeat(tmp_path):
    ran(tmp_path, GIL.replace("heartbeat_s=0.2", "heartbeat_s=100"))
    assert "hung_in_c" in stacks_file(files(tmp_path / "logs")[0]).read_text()


def test_a_frozen_process_is_not_told_to_have_stalled(tmp_path):
    process, path = started(tmp_path, HEAD + """
tracing.init_structured_logger("frozen", "logs", heartbeat_s=0.1, stall_timeout_s=2)
print("on", flush=True)
for line in sys.stdin:
    with log_trace_span("step"):
        pass
""", stdin=subprocess.PIPE)
    try:
        assert process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGSTOP)
        size = path.stat().st_size
        time.sleep(4)   # what is tested is that nothing happens
        assert path.stat().st_size <= size + 200
        process.stdin.write("go\n")
        process.stdin.flush()
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: only(records(path, torn_end=True), "E", "step"))
    finally:
        ended(process)
    assert not [r for r in only(records(path, torn_end=True), "i", "stacks") if r["args"]["why"] == "stall"]


# ---- Signals, and who owns faulthandler ----

WAITS = HEAD + """
tracing.init_structured_logger("waits", "logs", heartbeat_s=0.1)

def here_it_waits():
    print("waiting", flush=True)
    while True:
        time.sleep(0.05)
with log_trace_span("step"):
    here_it_waits()
"""


def test_kill_usr1_writes_stacks_at_any_time(tmp_path):
    process, path = started(tmp_path, WAITS)
    try:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda: "here_it_waits" in stacks_file(path).read_text())
        wait_for(lambda: only(records(path, torn_end=True), "i", "stacks"))
        assert process.poll() is None
    finally:
        ended(process)


def test_sigterm_says_where_the_process_was_and_ends_it(tmp_path):
    process, path = started(tmp_path, WAITS)
    try:
        assert process.stdout.readline() == "waiting\n"
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    finally:
        ended(process)
    text = stacks_file(path).read_text()
    assert "here_it_waits" in text and "Fatal" not in text
    assert only(records(path), "B", "step") and not only(records(path), "i", "process_end")


def test_the_owners_sigterm_handler_still_runs(tmp_path):
    process, path = started(tmp_path, HEAD + """
def stop(number, frame):
    log_trace_instant("signal", {"signal": "SIGTERM"})
    tracing.close_structured_logger("signal", signal="SIGTERM")
    sys.exit(3)
signal.signal(signal.SIGTERM, stop)
""" + WAITS.replace(HEAD, ""))
    try:
        assert process.stdout.readline() == "waiting\n"
        process.terminate()
        assert process.wait(60) == 3
    finally:
        ended(process)
    assert only(records(path), "i", "signal")
    assert only(records(path), "i", "process_end")[0]["args"] == {"how": "signal", "signal": "SIGTERM"}
    assert "here_it_waits" in stacks_file(path).read_text()


@pytest.mark.parametrize("owner", ["signal.signal(signal.SIGUSR1, lambda *_: print('mine', flush=True))",
                                   "faulthandler.register(signal.SIGUSR1, sys.stdout)"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_sigusr1_that_is_taken_stays_its_owners(tmp_path, owner, when):
    lines = [owner, 'tracing.init_structured_logger("usr1", "logs", heartbeat_s=0)']
    if when == "after":
        if "faulthandler" in owner:
            pytest.skip("faulthandler has one owner a signal, the last that registers")
        lines.reverse()
    out = ran(tmp_path, HEAD + "\n".join(lines) + """
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.1)
tracing.close_structured_logger()
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.1)
""")
    assert out.count("mine") == 2 or out.count("program.py") >= 2
    assert [p.suffix for p in (tmp_path / "logs").iterdir()] == [".jsonl"]


def test_a_timer_that_is_in_use_stays_its_owners(tmp_path):
    done = program(tmp_path, HEAD + """
faulthandler.dump_traceback_later(2, file=sys.stdout)
tracing.init_structured_logger("taken", "logs", heartbeat_s=0.1, stall_timeout_s=0.5)
time.sleep(3)
tracing.close_structured_logger()
""", env=environment())
    assert done.returncode == 0 and "Timeout (0:00:02)!" in done.stdout
    assert done.stderr.count("\n") == 1 and "in use by somebody else" in done.stderr


def test_a_timer_that_is_taken_later_is_given_up(tmp_path):
    done = program(tmp_path, HEAD + """
tracing.init_structured_logger("lent", "logs", heartbeat_s=0.1, stall_timeout_s=50)
time.sleep(0.3)
faulthandler.dump_traceback_later(1, file=sys.stdout)
time.sleep(2)
faulthandler.dump_traceback_later(1000, file=sys.stdout)
time.sleep(0.3)
tracing.close_structured_logger()   # must not cancel it
time.sleep(0.2)
print(len(os.listdir("/proc/self/task")), "threads")
faulthandler.cancel_dump_traceback_later()
while len(os.listdir("/proc/self/task")) > 1:   # the timer's thread takes a moment to go
    time.sleep(0.01)
""", env=environment())
    assert done.returncode == 0 and "Timeout (0:00:01)!" in done.stdout, done.stderr
    assert done.stdout.endswith("2 threads\n")
    assert done.stderr.count("\n") == 1 and "in use by somebody else" in done.stderr


def test_faulthandler_is_given_back_at_close(tmp_path):
    out = ran(tmp_path, HEAD + """
print(faulthandler.is_enabled())
tracing.init_structured_logger("back", "logs")
print(faulthandler.is_enabled())
tracing.close_structured_logger()
print(faulthandler.is_enabled(), faulthandler.unregister(signal.SIGUSR1),
      faulthandler.unregister(signal.SIGTERM))
faulthandler.enable()
tracing.init_structured_logger("back", "logs")
tracing.close_structured_logger()
print(faulthandler.is_enabled())
""")
    assert out.split() == ["False", "True", "False", "False", "False", "True"]


# ---- How a process ends ----

@pytest.mark.parametrize("last, code, wanted", [
    ("tracing.close_structured_logger()", 0, {"how": "ok"}),
    ("", 0, {"how": "exit"}),
    ("sys.exit(3)", 3, {"how": "exit", "code": 3}),
    ("sys.exit()", 0, {"how": "exit"}),
    ("""
with log_trace_span("step"):
    sys.exit("no data")
""", 1, {"how": "exit", "code": "no data"}),
    ("""
try:
    sys.exit(2)
except SystemExit:
    set_step(1)
""", 0, {"how": "exit"}),
    ("""
try:
    1 / 0
except ZeroDivisionError:
    tracing.close_structured_logger("exception")
""", 0, {"how": "exception", "type": "ZeroDivisionError"}),
    ("""
def broken():
    raise ValueError("bad\\nnews")
broken()
""", 1, {"how": "exception", "type": "ValueError", "message": "bad\nnews"}),
    ("raise KeyboardInterrupt", -2, {"how": "exception", "type": "KeyboardInterrupt"}),
    ("threading.Thread(target=lambda: 1 / 0).start()", 0, {"how": "exit"})])
def test_the_last_record_says_how_a_process_ended(tmp_path, last, code, wanted):
    done = program(tmp_path, HEAD + 'tracing.init_structured_logger("ends", "logs")\n' + last,
                   env=environment())
    assert done.returncode == code, done.stderr
    found = all_records(tmp_path / "logs")
    end, = only(found, "i", "process_end")
    assert found[-1] == end and wanted.items() <= end["args"].items()
    if wanted["how"] == "exception" and "broken" in last:
        assert end["args"]["frames"][0].endswith(":broken") and "Traceback" in done.stderr
    if wanted["how"] == "exit" and "code" not in wanted:
        assert "code" not in end["args"]


def test_os_exit_and_a_crash_in_c_say_nothing_but_leave_stacks(tmp_path):
    done = program(tmp_path, HEAD + """
tracing.init_structured_logger("ends", "logs")
def crashes():
    ctypes.string_at(0)
with log_trace_span("step"):
    crashes()
""", env=environment())
    assert done.returncode == -signal.SIGSEGV
    path, = files(tmp_path / "logs")
    assert not only(records(path), "i", "process_end") and only(records(path), "B", "step")
    assert "Fatal Python error: Segmentation fault" in stacks_file(path).read_text()
    assert "crashes" in stacks_file(path).read_text()


def test_nothing_hangs_or_speaks_at_the_end_of_an_interpreter_full_of_threads(tmp_path):
    out = ran(tmp_path, HEAD + """
import atexit
tracing.init_structured_logger("end", "logs", heartbeat_s=0.001, stall_timeout_s=0.01)
def busy():
    while True:
        with log_trace_span("daemon"):
            pass
class Late:
    def __del__(self):
        log_trace_instant("late")
        with log_trace_span("late"):
            pass
late = Late()
for _ in range(3):
    threading.Thread(target=busy, daemon=True).start()
def last():
    log_trace_instant("after the end")
atexit.register(last)
time.sleep(0.3)
print("end")
""")
    assert out == "end\n"
    found = all_records(tmp_path / "logs")
    assert only(found, "i", "process_end")


def test_a_logging_handler_that_traces_does_not_lock_up(tmp_path):
    done = program(tmp_path, HEAD + """
import logging
class Traced(logging.Handler):
    def emit(self, record):
        with log_trace_span("logging"):
            print("handled", flush=True)
logging.getLogger().addHandler(Traced())
tracing.init_structured_logger("logs itself", "logs", heartbeat_s=0.01)
def noise():
    for i in range(300):
        log_trace_scalar({f"bad{i}": "text"})
        logging.getLogger("x").warning("y")
threads = [threading.Thread(target=noise) for _ in range(3)]
[t.start() for t in threads], [t.join() for t in threads]
tracing.close_structured_logger()
""", env=environment())
    assert done.returncode == 0 and done.stdout.count("handled") == 901, done.stderr


def test_a_signal_handler_may_trace_while_the_main_thread_does(tmp_path):
    ran(tmp_path, HEAD + """
tracing.init_structured_logger("signals", "logs", heartbeat_s=0)
signal.signal(signal.SIGALRM, lambda *_: log_trace_instant("alarm"))
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
end = time.monotonic() + 1
while time.monotonic() < end:
    with log_trace_span("work"):
        pass
signal.setitimer(signal.ITIMER_REAL, 0)
tracing.close_structured_logger()
""")
    found = all_records(tmp_path / "logs")
    assert only(found, "i", "alarm") and len(only(found, "B")) == len(only(found, "E"))


def test_a_keyboard_interrupt_is_passed_on_and_leaves_whole_lines(tmp_path):
    ran(tmp_path, HEAD + """
tracing.init_structured_logger("interrupts", "logs", heartbeat_s=0)
class Stop(BaseException):
    pass
def stop(*_):
    raise Stop
signal.signal(signal.SIGALRM, stop)
stops = 0
while stops < 300:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0007)
        while True:
            with log_trace_span("work"):
                with log_trace_span("inner"):
                    pass
    except Stop:
        stops += 1
signal.setitimer(signal.ITIMER_REAL, 0)
other = threading.Thread(target=lambda: log_trace_instant("the lock is free"))
other.start()
other.join(60)
tracing.close_structured_logger()
""")
    assert only(all_records(tmp_path / "logs"), "i", "the lock is free")
