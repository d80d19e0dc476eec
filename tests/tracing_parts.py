"""What the tests of tracing.py share: reading traces strictly, and running small programs that write some."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

from conftest import ROOT, run

LOOSE = {"M": {"continues"}, "B": {"step", "tid", "task", "tags", "sync", "args"},
         "E": {"step", "tid", "task", "tags", "err"}, "C": {"step", "tid", "task"},
         "i": {"step", "tid", "task", "args"}, "D": {"name", "tid"}}
FIXED = {"M": set("ph v ts mono_us boot_id rank local_rank world_size node host pid source worker parent run "
                  "attempt heartbeat_s stall_timeout_s versions part".split()),
         "B": {"ph", "ts", "name"}, "E": {"ph", "ts", "name", "dur"}, "C": {"ph", "ts", "args"},
         "i": {"ph", "ts", "name"}, "D": {"ph", "at"}}


def no_constant(text):
    raise AssertionError(f"{text} is no strict JSON")


def no_twins(pairs):
    assert len(dict(pairs)) == len(pairs), f"a key twice in {pairs}"
    return dict(pairs)


def records(path, torn_end=False):
    """All records of a file, checked against the format's table. torn_end: the last line may be torn."""
    data = Path(path).read_bytes()
    lines = data.split(b"\n")
    tail = lines.pop()
    assert torn_end or not tail, f"{path} ends in the middle of a line: {tail!r}"
    found = []
    for line in lines:
        record = json.loads(line.decode("ascii"), parse_constant=no_constant, object_pairs_hook=no_twins)
        kind = record["ph"]
        assert FIXED[kind] <= set(record) <= FIXED[kind] | LOOSE[kind] | {"lost"}, record
        found.append(record)
    assert not found or found[0]["ph"] == "M", f"{path} begins with {found[0]}"
    return found


def files(folder):
    return sorted(Path(folder).rglob("*.jsonl"))


def all_records(folder):
    """The records of all files of a folder, one list."""
    return [record for path in files(folder) for record in records(path)]


def only(found, ph=None, name=None):
    return [r for r in found if (ph is None or r["ph"] == ph) and (name is None or r.get("name") == name)]


def program(tmp_path, text, *args, python=sys.executable, env=None, timeout_s=120):
    """Run a program in a folder that holds it and a copy of tracing.py. Returns the finished process."""
    shutil.copy(ROOT / "tracing.py", tmp_path / "tracing.py")
    (tmp_path / "program.py").write_text(text)
    return run([python, "program.py", *args], cwd=tmp_path, timeout_s=timeout_s, env=env)


def ran(tmp_path, text, *args, **options):
    """The same, for a program that must end well and say nothing on stderr. Returns its stdout."""
    done = program(tmp_path, text, *args, **options)
    assert done.returncode == 0 and not done.stderr, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def wait_for(condition, timeout_s=120):
    """Poll until condition() is true and return its value; fail at the bound."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not true within {timeout_s} s")


def environment(**variables):
    """Launcher's variables as given, and none that the test's own process may have."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT",
                 "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    return {name: str(value) for name, value in variables.items()}
