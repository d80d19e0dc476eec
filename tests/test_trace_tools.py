"""Reading traces with trace_tools.py: whatever the files look like, what can be read is read and the rest is
named."""

import gzip
import random
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, interpreter
from trace_parts import T0, Trace, dump, export, phase, rank_of, summarize, tool, torchtitan_line, torchtitan_name

import trace_tools


def two_ranks(folder, steps=5):
    for rank in range(2):
        trace = Trace(rank, world_size=2)
        trace.end(trace.steps(1, steps) + 100)
        trace.write(folder / "structured_logs")
    return folder


def test_a_run_directory_its_logs_and_its_files_say_the_same(tmp_path):
    run = two_ranks(tmp_path / "run")
    whole = summarize(run)
    files = sorted((run / "structured_logs").iterdir())
    assert whole == summarize(run / "structured_logs") == summarize(*files)
    assert (whole["run"], whole["attempt"], whole["state"], whole["world_size"]) == ("r1", 0, "ended", 2)
    assert whole["hosts"] == ["node-0"] and whole["steps"] == {"first": 1, "last": 5}
    assert [(r["rank"], r["pid"], r["last_step"], r["state"]) for r in whole["ranks"]] == [
        (0, 4000, 5, "ended"), (1, 4001, 5, "ended")]
    assert whole["unreadable"] == [] and whole["warnings"] == [] and whole["open_spans"] == []


def test_own_time_and_waiting_are_told_apart(tmp_path):
    run = two_ranks(tmp_path)
    backward = phase(summarize(run), "backward")
    assert backward["count"] == 10 and backward["self_us"] == 10 * 10_000 and backward["wait_us"] == 10 * 2000
    rank = rank_of(summarize(run), 1)
    assert rank["wait_us"] == 5 * 2000 and rank["own_us"] == 5 * (2000 + 3010 + 8000 + 510)


def test_the_numbers_do_not_depend_on_how_the_lines_are_read(tmp_path):
    """Steps that are alike are read by one expression; a field that nobody knows sends every line the long
    way."""
    plain, other = Trace(), Trace(unknown=1)
    for trace in (plain, other):
        at = trace.steps(1, 40)
        trace.b("evaluate", at, 40).span("forward", at + 5, at + 5000, 40).e("evaluate", at + 6000, 40)
        trace.i("heartbeat", at + 6000, args={"rss_mb": 1.0, "idle_s": 0.0, "lost": 0})
        trace.end(trace.steps(41, 90, at=at + 7000, data=2500))
    plain.write(tmp_path / "plain")
    other.lines = [line[:-1] + ',"unknown":1}' for line in other.lines]
    other.write(tmp_path / "other")
    assert summarize(tmp_path / "plain") == summarize(tmp_path / "other")


def test_gzip_and_rotated_parts(tmp_path):
    trace = Trace()
    trace.end(trace.steps(1, 30))
    whole = tmp_path / "whole"
    trace.write(whole)
    header, lines = trace.lines[0], trace.lines[1:]
    cut, rotated = [0, 123, 300, len(lines)], tmp_path / "rotated"
    for part, (begin, end) in enumerate(zip(cut, cut[1:])):
        repeated = [] if part == 0 else open_begins(lines[:begin])
        text = "\n".join([part_header(header, lines, begin, part)] + repeated + lines[begin:end]) + "\n"
        name = trace.name() + ("" if part == 2 else f".{2 - part}")
        path = trace.write(rotated, name, text)
        if part == 1:
            with gzip.open(f"{path}.gz", "wb") as packed:
                packed.write(path.read_bytes())
            path.unlink()
    expected, found = summarize(whole), summarize(rotated)
    assert found == expected and found["warnings"] == []
    # The oldest part has been rotated away: what is there counts, and it is said from which step on.
    (rotated / (trace.name() + ".2")).unlink()
    found = summarize(rotated)
    assert found["steps"]["first"] == 11 and "starts at step 11" in found["warnings"][0]
    assert "max_file_size_mb" in found["warnings"][0]
    assert phase(found, "data")["count"] == 19 and phase(found, "step")["count"] == 20
    # And one in the middle is missing.
    (rotated / (trace.name() + ".1.gz")).unlink()
    trace.write(rotated, trace.name() + ".2", "\n".join([header] + lines[:123]) + "\n")
    assert "1 rotated parts are missing" in "".join(summarize(rotated)["warnings"])


def open_begins(lines):
    stack = []
    for line in lines:
        if line.startswith('{"ph":"B"'):
            stack.append(line)
        elif line.startswith('{"ph":"E"'):
            stack.pop()
    return stack


def part_header(header, lines, begin, part):
    if part == 0:
        return header
    now = int(lines[begin].split('"ts":')[1].split(",")[0])
    return header.replace(f'"ts":{T0}', f'"ts":{now}').replace('"part":0',
                                                               f'"part":{part},"continues":"before"')


def test_a_file_that_is_there_plain_and_packed_counts_once(tmp_path):
    run = two_ranks(tmp_path)
    path = next((run / "structured_logs").glob("*rank00001*"))
    with gzip.open(f"{path}.gz", "wb") as packed:
        packed.write(path.read_bytes())
    found = summarize(run)
    assert phase(found, "data")["count"] == 10 and "left out" in found["warnings"][0]


def test_a_rank_that_became_known_late_is_one_process(tmp_path):
    early, late = Trace(0, 1, pid=77, run=None), Trace(3, 4, pid=77, run=None, ts=1000, part=1)
    early.b("startup", 100).span("imports", 200, 900)
    late.lines[0] = late.lines[0][:-1] + f',"continues":"{early.name()}"}}'
    late.lines.append(early.lines[1])  # the span that is still open
    late.begins = early.begins
    late.e("startup", 5000).end(6000)
    early.write(tmp_path), late.write(tmp_path)
    found = summarize(tmp_path)
    assert [r["rank"] for r in found["ranks"] if r["state"] != "missing"] == [3] and found["world_size"] == 4
    assert phase(found, "startup")["count"] == 1 and phase(found, "imports")["count"] == 1
    assert phase(found, "startup")["max_us"] == 4900 and found["open_spans"] == []


def test_the_latest_run_and_attempt_unless_told_otherwise(tmp_path):
    for run, attempt, ts in (("old", 0, 0), ("new", 0, 10**8), ("new", 1, 2 * 10**8)):
        trace = Trace(run=run, attempt=attempt, ts=ts)
        trace.end(trace.steps(1, 2 + attempt, at=ts))
        trace.write(tmp_path)
    found = summarize(tmp_path)
    assert (found["run"], found["attempt"], found["steps"]["last"]) == ("new", 1, 3)
    assert any("run old" in w for w in found["warnings"]) and any("attempt 0" in w for w in found["warnings"])
    assert summarize(tmp_path, "--attempt", 0)["steps"]["last"] == 2
    assert summarize(tmp_path, "--run", "old")["run"] == "old"
    refused = tool("summarize", tmp_path, "--run", "odl")
    assert refused.returncode == 1 and "did you mean old?" in refused.stderr
    refused = tool("summarize", tmp_path, "--attempt", 7)
    assert refused.returncode == 1 and "0, 1" in refused.stderr


def test_a_second_start_under_the_same_id_is_a_new_attempt(tmp_path):
    for pid, ts in ((1, 0), (2, 10**8)):
        trace = Trace(run=None, pid=pid, ts=ts)
        trace.end(trace.steps(1, pid, at=ts))
        trace.write(tmp_path)
    assert summarize(tmp_path)["steps"]["last"] == 2
    assert summarize(tmp_path, "--attempt", 0)["steps"]["last"] == 1


def test_missing_ranks_are_said_to_be_missing(tmp_path):
    trace = Trace(1, world_size=4)
    trace.end(trace.steps(1, 3))
    trace.write(tmp_path)
    found = summarize(tmp_path)
    assert [r["rank"] for r in found["ranks"] if r["state"] == "missing"] == [0, 2, 3]
    assert "no trace of rank 0,2-3 (3 of 4)" in found["warnings"][0]


def test_nothing_readable(tmp_path):
    done = tool("summarize", tmp_path)
    assert done.returncode == 1 and f"{tmp_path}/[structured_logs/]**/*.jsonl[.N][.gz]" in done.stderr
    done = tool("summarize", tmp_path / "not there")
    assert done.returncode == 1 and "no such file or directory" in done.stderr
    (tmp_path / "metrics.jsonl").write_text('{"loss":1}\n')
    done = tool("export", tmp_path)
    assert done.returncode == 1 and "no trace records in 1 file" in done.stderr
    assert not (tmp_path / "analysis").exists()


@pytest.mark.parametrize("args", [[], ["summarise", "."], ["summarize"], ["summarize", ".", "--steps", "3:x"],
                                  ["summarize", ".", "--ranks", "a"], ["export", "a.jsonl"], ["export", "a", "b"]])
def test_usage(args):
    assert tool(*args).returncode == 2


# ---- Damaged files


def damaged(tmp_path, damage):
    """A trace of 300 steps whose bytes damage() has changed, summarized."""
    trace = Trace()
    trace.end(trace.steps(1, 300))
    path = trace.write(tmp_path, text=damage(trace.text().encode()))
    return summarize(tmp_path), path


def test_torn_in_the_last_line(tmp_path):
    def tear(data):
        return data[:data.rindex(b'"optimizer"') + 5]

    found, path = damaged(tmp_path, tear)
    assert found["unreadable"] == [{"file": str(path), "lines": 1,
                                    "first_line": path.read_bytes().count(b"\n") + 1,
                                    "why": "last line incomplete"}]
    assert phase(found, "data")["count"] == 300 and phase(found, "optimizer")["count"] == 299


def test_cut_inside_a_character(tmp_path):
    trace = Trace().b("forward", 10).e("forward", 20, err="OSError: voll").lines
    text = ("\n".join(trace) + "\n").encode().replace(b"voll", "übervoll".encode())
    Trace().write(tmp_path, text=text + text.splitlines()[-1].split("bervoll".encode())[0][:-1])
    found = summarize(tmp_path)
    assert found["errors"][0]["err"] == "OSError: übervoll"
    assert [(u["lines"], u["first_line"]) for u in found["unreadable"]] == [(1, 4)]


@pytest.mark.parametrize("rubbish, why", [
    (b"\0" * 4096, "NUL bytes"), (b"}{]\n", "no JSON object"), (b"17\n", "no JSON object"), (b"\xff\xfe\x80\n", "not UTF-8"),
    (b'{"ph":"B","ts":17959586', "no JSON object"), (b"[1,2\n3]\n", "no JSON object"),
    (b'{"ph":"Q","ts":1795958674000000}\n', "unknown kind"), (b'{"name":"x"}\n', "no time stamp"),
    (b'{"ph":"B","ts":"now","name":"x"}\n', "no time stamp"), (b'{"ph":"B","ts":1795958674000001,"name":[]}\n', "unusable"),
    (b"[" * 100_000 + b"\n", "no JSON object"), (b'{"ph":"E","ts":1795958674900000,"name":"data","dur":"x"}\n', "unusable")])
def test_rubbish_between_the_lines(tmp_path, rubbish, why):
    """Every other record still counts, also the one on the same line behind half a record or NUL bytes."""
    def damage(data):
        lines = data.splitlines(keepends=True)
        return b"".join(lines[:1000]) + rubbish + b"".join(lines[1000:])

    found, path = damaged(tmp_path, damage)
    assert phase(found, "optimizer")["count"] == 300
    (entry,) = found["unreadable"] or [{"why": ""}]
    assert why in entry["why"] and entry["file"] == str(path) and entry["lines"] in (1, 2)
    assert entry["first_line"] in (0, 1001) or entry["first_line"] < 1001


def test_harmless_differences(tmp_path):
    def damage(data):
        lines = data.splitlines()
        return b"\xef\xbb\xbf" + b"\r\n".join(lines[:500]) + b"\r\n\r\n\n   \n" + b"\n".join(lines[500:]) + b"\n\n"

    found, _ = damaged(tmp_path, damage)
    assert found["unreadable"] == [] and phase(found, "data")["count"] == 300


def test_a_block_that_was_written_twice(tmp_path):
    def damage(data):
        lines = data.splitlines(keepends=True)
        return b"".join(lines[:1000] + lines[700:])

    found, _ = damaged(tmp_path, damage)
    assert phase(found, "data")["count"] == 300 and phase(found, "step")["self_us"] == 300 * 20
    assert [(u["lines"], u["why"]) for u in found["unreadable"]] == [(300, "written twice")]


def test_records_out_of_order(tmp_path):
    def damage(data):
        lines = data.splitlines(keepends=True)
        return b"".join(lines[:1000] + lines[1500:2000] + lines[1000:1500] + lines[2000:])

    found, _ = damaged(tmp_path, damage)
    assert phase(found, "data")["count"] == 300 and phase(found, "step")["self_us"] == 300 * 20
    assert found["unreadable"] == []


def test_far_out_of_order_is_left_out_and_counted(tmp_path):
    trace = Trace()
    trace.end(trace.steps(1, 2000))
    lines = trace.text().splitlines(keepends=True)
    trace.write(tmp_path, text="".join(lines[:1] + lines[100:] + lines[1:100]))
    found = summarize(tmp_path)
    assert sum(u["lines"] for u in found["unreadable"]) == 99
    assert all("out of order" in u["why"] for u in found["unreadable"])


def test_a_lost_end_does_not_shift_all_that_follows(tmp_path):
    def damage(data):
        lines = data.splitlines(keepends=True)
        at = [i for i, line in enumerate(lines) if b'"ph":"E"' in line and b'"name":"step"' in line][10]
        return b"".join(lines[:at]) + b"garbage\n" + b"".join(lines[at + 1:])

    found, _ = damaged(tmp_path, damage)
    assert found["open_spans"] == [] and "1 spans began whose end is not in the trace" in "".join(found["warnings"])
    assert phase(found, "step")["count"] == 299 and phase(found, "optimizer")["self_us"] == 300 * 500


def test_records_that_the_tracer_could_not_write_are_told(tmp_path):
    trace = Trace().b("step", 0, 1).b("data", 10, 1)
    trace.b("step", 1000, 2, lost=5).span("data", 1010, 1500, 2).e("step", 2000, 2).end(2100)
    trace.write(tmp_path)
    found = summarize(tmp_path)
    assert "the tracer lost 5 records" in "".join(found["warnings"]) and found["open_spans"] == []


def test_a_newer_version_is_read_as_far_as_it_is_understood(tmp_path):
    trace = Trace(v=2, shiny={"new": [1, 2]}).span("data", 0, 100, 1, shade="blue")
    trace.write(tmp_path)
    found = summarize(tmp_path)
    assert phase(found, "data")["count"] == 1 and "trace format 2" in "".join(found["warnings"])


def test_a_header_that_cannot_be_read(tmp_path):
    trace = Trace(2, world_size=3)
    trace.end(trace.steps(1, 3))
    trace.write(tmp_path, text="\n".join(["%$#"] + trace.lines[1:]) + "\n")
    found = summarize(tmp_path)
    assert [r["rank"] for r in found["ranks"] if r["state"] == "ended"] == [2]  # from the file's name
    assert [(u["lines"], u["first_line"]) for u in found["unreadable"]] == [(1, 1)]


def test_a_truncated_gzip_file(tmp_path):
    trace = Trace()
    trace.steps(1, 2000)
    packed = gzip.compress(trace.text().encode())
    trace.write(tmp_path, trace.name() + ".gz", packed[:len(packed) // 2])
    found = summarize(tmp_path)
    assert 100 < phase(found, "data")["count"] < 2000 and "EOFError" in found["unreadable"][0]["why"]


def test_no_damage_raises(tmp_path):
    """A hundred and fifty random wounds, each read, rendered and exported."""
    trace = Trace()
    trace.b("epoch", 0).span("prefetch", 5, 50, tid=7).span("task", 60, 90, task="Task-1")
    trace.e("epoch", trace.steps(1, 30)).end(10**6)
    whole = trace.text().encode()
    wounds = random.Random(3)
    for number in range(150):
        data = bytearray(whole)
        for _ in range(wounds.randrange(1, 6)):
            at, kind = wounds.randrange(len(data)), wounds.randrange(4)
            if kind == 0:
                data[at] = wounds.randrange(256)
            elif kind == 1:
                del data[at:at + wounds.randrange(200)]
            elif kind == 2:
                data[at:at] = bytes(wounds.randrange(256) for _ in range(wounds.randrange(50)))
            else:
                data[at:at] = data[:wounds.randrange(len(data))][-500:]
        trace.write(tmp_path, text=bytes(data))
        run = trace_tools.Run([str(tmp_path)]).read()
        text = trace_tools.render(trace_tools.summarize(run), 20, False)
        assert max(map(len, text.splitlines())) <= 100, number
        trace_tools.export(trace_tools.Run([str(tmp_path)]), str(tmp_path / "out.json"))


@pytest.mark.parametrize("wrong", [{"name": ["step"]}, {"name": None}, {"name": "step", "tid": [1]}])
def test_a_damaged_begin_right_behind_the_header(tmp_path, wrong):
    """Older than the header, as the begin of a span that is still open, but no span."""
    trace = Trace(ts=100).add(ph="B", ts=T0, **wrong)
    trace.steps(1, 30, at=200)
    trace.write(tmp_path)
    found = summarize(tmp_path)
    assert phase(found, "optimizer")["count"] == 30
    (entry,) = found["unreadable"]
    assert "unusable" in entry["why"] and entry["lines"] == 1


def test_no_value_raises(tmp_path):
    """Each field of each record in turn has a value that nobody expects there."""
    trace = Trace(world_size=2)
    trace.add(ph="D", tid=7, at="prefetcher").b("epoch", 0).span("prefetch", 5, 50, tid=7).span("t", 60, 90,
        task="Task-1")
    trace.e("epoch", trace.steps(1, 30))
    trace.i("stacks", 10**6, args={"why": "stall", "seconds": 5,
                                   "threads": [{"name": "MainThread", "stack": ["a:1:b"]}]})
    trace.i("signal", 10**6, args={"signal": 15}).i("heartbeat", 10**6,
                                                    args={"rss_mb": 1, "idle_s": 2, "lost": 0})
    trace.end(10**6, "exception", type="E", message="m", frames=["a:1:b"])
    odd = [None, True, -1, 10**9, 10**18, 10**400, 0.5, 1e300, "", "x", [], [1], {}, {"a": {}}, "\ud800", "2"]
    source = random.Random(5)
    for number in range(250):
        lines = list(trace.lines)
        for _ in range(source.randrange(1, 4)):
            at = source.choice([0, 0, source.randrange(len(lines)), len(lines) - source.randrange(1, 6)])
            record = trace_tools.json.loads(lines[at])
            inside = record["args"] if isinstance(record.get("args"),
                                                  dict) and source.random() < 0.5 else record
            if inside:
                inside[source.choice(sorted(inside))] = source.choice(odd)
            lines[at] = dump(record)
        trace.write(tmp_path, text="\n".join(lines) + "\n")
        try:
            run = trace_tools.Run([str(tmp_path)]).read()
            text = trace_tools.render(trace_tools.summarize(run), 20, False)
            trace_tools.export(trace_tools.Run([str(tmp_path)]), str(tmp_path / "out.json"))
        except trace_tools.Refusal:
            continue
        assert max(map(len, text.splitlines())) <= 100, number


# ---- torchtitan


def torchtitan_run(folder):
    for rank in range(2):
        at, seq, lines = 0, iter(range(1000)), [torchtitan_line(rank, 0, 0, "training_start", "instant",
                                                                step=None)]
        for step in range(1, 11):
            for name, us in (("fetching_batch", 2000), ("fwd_bwd", 9000)):
                lines.append(torchtitan_line(rank, next(seq), at, f"{name}_start", step=step))
                at += us
                lines.append(torchtitan_line(rank, next(seq), at, f"{name}_end", step=step, value=us / 1000))
            lines.append(torchtitan_line(rank, next(seq), at, "metric_value", "instant", step,
                                         event_name="loss", value=2.0))
        for task in ("Task-2", "Task-3"):
            lines.append(torchtitan_line(rank, next(seq), at, "rl_generate_start", step=10, task_name=task))
        for task in ("Task-2", "Task-3"):
            at += 5000
            lines.append(torchtitan_line(rank, next(seq), at, "rl_generate_end", step=10, task_name=task,
                                         value=5.0))
        lines.append(torchtitan_line(rank, next(seq), at, "checkpoint_start", step=10))
        if rank == 1:
            lines.append(torchtitan_line(rank, next(seq), at, "checkpoint_error", step=10,
                                         message='[step 10] checkpoint_error: RuntimeError: disk "full"'))
        lines.append(torchtitan_line(rank, next(seq), at + 70, "checkpoint_end", step=10, value=0.07))
        if rank == 0:
            lines.append(torchtitan_line(rank, next(seq), at + 80, "validate_start", step=10))
        folder.mkdir(exist_ok=True)
        (folder / torchtitan_name(rank)).write_text("\n".join(lines) + "\n")
    return folder


def test_torchtitan_logs(tmp_path):
    found = summarize(torchtitan_run(tmp_path / "structured_logs"))
    assert phase(found, "fetching_batch")["count"] == 20 and phase(found, "fwd_bwd")["self_us"] == 20 * 9000
    assert phase(found, "rl_generate")["count"] == 4
    assert [(e["rank"], e["name"], e["err"])
            for e in found["errors"]] == [(1, "checkpoint", 'RuntimeError: disk "full"')]
    assert [(s["rank"], s["name"], s["at"])
            for s in found["open_spans"]] == [(0, "validate", "loop.py:9:<module>")]
    assert (rank_of(found, 0)["state"], rank_of(found, 1)["state"]) == ("killed", "failed")
    assert rank_of(found, 0)["host"] == "node-a" and found["steps"] == {"first": 1, "last": 10}
    assert found["unreadable"] == []


def test_torchtitan_and_ours_in_one_folder(tmp_path):
    torchtitan_run(tmp_path)
    trace = Trace(source="ours")
    trace.end(trace.steps(1, 3))
    trace.write(tmp_path)
    found = summarize(tmp_path)
    assert {r["source"] for r in found["ranks"]} == {"training", "ours"} and len(found["ranks"]) == 3


def test_torchtitans_own_logger(tmp_path):
    pytest.importorskip("torchtitan.observability")
    script = """if 1:
        import asyncio, sys
        from torchtitan.observability import structured_logger as t
        t.init_structured_logger("training", sys.argv[1])
        async def task():
            with t.log_trace_span("rl_generate"):
                await asyncio.sleep(0.01)
        async def tasks():
            await asyncio.gather(task(), task())
        for step in range(1, 6):
            t.set_step(step)
            with t.log_trace_span("fwd_bwd"):
                pass
            t.log_trace_scalar({"loss": 1.0})
        asyncio.run(tasks())
    """
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.PIPE, text=True,
                          timeout=180)
    if done.returncode and "ImportError" in done.stderr or "AttributeError" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    found = summarize(tmp_path)
    assert phase(found, "fwd_bwd")["count"] == 5 and phase(found,
                                                           "rl_generate")["count"] == 2 and not found["unreadable"]


# ---- Where it runs


@pytest.mark.parametrize("minor", range(8, 15))
def test_every_interpreter_that_is_here(tmp_path, minor):
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"no python3.{minor}")
    two_ranks(tmp_path)
    torchtitan_run(tmp_path / "titan")
    expected = summarize(tmp_path / "structured_logs")
    done = tool("summarize", tmp_path / "structured_logs", "--json", python=python)
    assert done.stdout and trace_tools.json.loads(done.stdout) == expected
    assert tool("summarize", tmp_path / "titan", python=python).returncode == 0
    assert tool("export", tmp_path, "--gzip", python=python).returncode == 0


def test_one_file_under_any_name_is_enough(tmp_path):
    two_ranks(tmp_path / "run")
    copy = shutil.copy(ROOT / "trace_tools.py", tmp_path / "zzz.py")
    done = subprocess.run([sys.executable, "-I", "-S", copy, "summarize", tmp_path / "run"],
                          stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "backward" in done.stdout


def test_many_files_and_few_descriptors(tmp_path):
    for rank in range(100):
        Trace(rank, world_size=100).span("data", 0, 100, 1).end(200).write(tmp_path)
    command = f'ulimit -n 40; exec "{sys.executable}" "{ROOT / "trace_tools.py"}" summarize "{tmp_path}" --json'
    done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    assert trace_tools.json.loads(done.stdout)["phases"][0]["count"] == 100


def test_a_closed_pipe_is_no_error(tmp_path):
    two_ranks(tmp_path)
    done = subprocess.run(f'"{sys.executable}" "{ROOT / "trace_tools.py"}" summarize "{tmp_path}" --json | head -c 10',
                          shell=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.stderr == ""
