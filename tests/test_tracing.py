"""tracing.py in one process: its calls, records and values; beside torchtitan's; on every Python there is."""

import importlib.util
import math
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction

import pytest
from conftest import ROOT, interpreter
from tracing_parts import all_records, environment, files, only, program, ran, records

sys.path.insert(0, str(ROOT))
import tracing  # noqa: E402
from tracing import log_trace_instant, log_trace_scalar, log_trace_span, set_step  # noqa: E402


@pytest.fixture
def trace(tmp_path):
    """Tracing on, in this process; trace() closes it and returns the records."""
    def finish():
        tracing.close_structured_logger()
        return all_records(tmp_path)
    set_step(None)
    tracing.init_structured_logger("test", tmp_path, heartbeat_s=0, stall_timeout_s=0)
    yield finish
    tracing.close_structured_logger()
    set_step(None)


# ---- Spans ----

def test_a_span_is_a_begin_and_an_end(trace):
    set_step(7)
    with log_trace_span("forward"):
        pass
    found = trace()
    begin, = only(found, "B")
    end, = only(found, "E")
    assert begin == {"ph": "B", "ts": begin["ts"], "name": "forward", "step": 7}
    assert end == {"ph": "E", "ts": begin["ts"] + end["dur"], "name": "forward", "step": 7, "dur": end["dur"]}
    place, = only(found, "D", "forward")
    assert place["at"].startswith(f"{__file__}:")
    assert place["at"].endswith("test_a_span_is_a_begin_and_an_end")
    assert only(found, "i", "process_end")[0]["args"] == {"how": "ok"}


def test_arguments_description_and_sync_are_in_the_begin(trace):
    with log_trace_span("all_reduce", "of the loss", sync=True, args={"bytes": 4}):
        pass
    found = trace()
    assert only(found, "B")[0]["sync"] is True
    assert only(found, "B")[0]["args"] == {"description": "of the loss", "bytes": 4}
    assert not {"sync", "args"} & set(only(found, "E")[0])


def test_an_exception_passes_and_is_named(trace):
    with pytest.raises(ZeroDivisionError):
        with log_trace_span("outer"):
            with log_trace_span("inner"):
                1 / 0
    assert [(r["name"], r["err"]) for r in only(trace(), "E")] == [
        ("inner", "ZeroDivisionError: division by zero"), ("outer", "ZeroDivisionError: division by zero")]


def test_one_object_is_entered_again_while_it_is_open(trace):
    span = log_trace_span("again")
    with span:
        with span as inner:
            inner.ready()
        with span:
            pass
    found = trace()
    assert "".join(r["ph"] for r in found if r.get("name") == "again" and r["ph"] in "BE") == "BBEBEE"
    ends = only(found, "E")
    assert ends[2]["dur"] >= ends[0]["dur"] + ends[1]["dur"]


def test_a_span_made_before_init_is_written_after_it(tmp_path):
    span = log_trace_span("early")

    @log_trace_span("decorated early", sync=True, args={"a": 1})
    def function():
        return 5
    with span:
        assert function() == 5
    tracing.init_structured_logger("test", tmp_path, heartbeat_s=0, stall_timeout_s=0)
    with span:
        assert function() == 5
    tracing.close_structured_logger()
    with span:
        function()
    begins = only(all_records(tmp_path), "B")
    assert [r["name"] for r in begins] == ["early", "decorated early"]
    assert begins[1]["sync"] and begins[1]["args"] == {"a": 1}


def test_an_init_inside_a_span_and_a_close_inside_a_span(tmp_path):
    with log_trace_span("outer"):
        tracing.init_structured_logger("test", tmp_path, heartbeat_s=0, stall_timeout_s=0)
        with log_trace_span("inner"):
            pass
        tracing.init_structured_logger("test", tmp_path, heartbeat_s=0, stall_timeout_s=0)   # the same: quiet
    with log_trace_span("open at close") as span:
        tracing.close_structured_logger()
        span.ready()
        log_trace_instant("late")
    found = all_records(tmp_path)
    assert [(r["ph"], r["name"]) for r in found if r["ph"] in "BE"] == [
        ("B", "inner"), ("E", "inner"), ("B", "open at close")]


def test_threads_keep_their_own_spans(trace):
    import threading
    inside = threading.Barrier(2)

    def work():
        with log_trace_span("shared name"):
            inside.wait(60)
    threads = [threading.Thread(target=work, name=f"worker {i}") for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = trace()
    names = {r["tid"]: r["at"] for r in only(found, "D") if "tid" in r}
    assert sorted(names.values()) == ["worker 0", "worker 1"]
    for tid in names:
        assert [r["ph"] for r in found if r.get("tid") == tid and r["ph"] in "BE"] == ["B", "E"]


def test_asyncio_tasks_are_named(trace):
    import asyncio

    @log_trace_span("rollout")
    async def rollout(seconds):
        await asyncio.sleep(seconds)
        return seconds

    async def main():
        return await asyncio.gather(*(asyncio.ensure_future(rollout(s)) for s in (0.02, 0.01)))
    assert asyncio.run(main()) == [0.02, 0.01]
    found = trace()
    begins, ends = only(found, "B"), only(found, "E")
    assert len({r["task"] for r in begins}) == 2 and {r["task"] for r in begins} == {r["task"] for r in ends}
    for end in ends:   # each end finds its begin by task and time
        assert [b for b in begins if b["task"] == end["task"] and b["ts"] == end["ts"] - end["dur"]]
    assert only(found, "D", "rollout")[0]["at"].startswith(__file__)


def test_generators_of_both_kinds_pass_values_and_exceptions_through(trace):
    import asyncio

    @log_trace_span("generator")
    def generator():
        try:
            received = yield 1
        except KeyError:
            received = "thrown"
        yield received
        return 3

    @log_trace_span("async generator")
    async def async_generator():
        try:
            received = yield 1
        except KeyError:
            received = "thrown"
        yield received

    async def both_ways():
        sent, thrown, left = async_generator(), async_generator(), async_generator()
        values = [await sent.__anext__(), await sent.asend("sent"), await thrown.__anext__(),
                  await thrown.athrow(KeyError()), await left.__anext__()]
        await left.aclose()
        for rest in (sent, thrown):
            with pytest.raises(StopAsyncIteration):
                await rest.__anext__()
        return values
    first = generator()
    assert [next(first), first.send("sent")] == [1, "sent"]
    with pytest.raises(StopIteration) as stop:
        next(first)
    assert stop.value.value == 3
    second = generator()
    assert [next(second), second.throw(KeyError())] == [1, "thrown"]
    second.close()
    assert asyncio.run(both_ways()) == [1, "sent", 1, "thrown", 1]
    found = trace()
    assert len(only(found, "B", "generator")) == len(only(found, "E", "generator")) == 2
    assert len(only(found, "B", "async generator")) == len(only(found, "E", "async generator")) == 3
    assert not [r for r in only(found, "E") if "err" in r]


def test_decorated_functions_keep_their_names_and_errors(trace):
    @log_trace_span("validate")
    def validate(x, *, y=2):
        """Doc."""
        return x / y
    assert (validate.__name__, validate.__doc__, validate(4)) == ("validate", "Doc.", 2)
    with pytest.raises(ZeroDivisionError):
        validate(1, y=0)
    assert [r.get("err") for r in only(trace(), "E")] == [None, "ZeroDivisionError: division by zero"]


def test_stacklevel_names_the_helpers_caller(trace):
    def helper():
        return log_trace_span("helped", stacklevel=3)

    def deeper():
        with helper():
            pass
        log_trace_instant("mark", stacklevel=50)
    deeper()
    places = {r["name"]: r["at"] for r in only(trace(), "D")}
    assert places["helped"].endswith("test_stacklevel_names_the_helpers_caller")
    assert places["mark"].startswith(__file__)


def test_a_ready_instant_belongs_to_its_span_whichever_thread_calls(trace):
    import threading
    set_step(3)
    with log_trace_span("backward", sync=True) as span:
        thread = threading.Thread(target=span.ready)
        thread.start()
        thread.join(60)
    span.ready()   # over: nothing to be said
    ready, = only(trace(), "i", "ready")
    assert ready == {"ph": "i", "ts": ready["ts"], "name": "ready", "step": 3, "args": {"span": "backward"}}


# ---- Steps and tags ----

def test_steps_relative_steps_and_tags(trace):
    set_step(101, relative_step=1)
    tracing.add_step_tag("gc")
    tracing.add_step_tag("gc")
    assert (tracing.get_step(), tracing.get_relative_step(), tracing.get_step_tags()) == (101, 1, ("gc",))
    with log_trace_span("tagged"):
        tracing.add_step_tag("eval")
    set_step(102, relative_step=2)
    with log_trace_span("next"):
        pass
    set_step(103)
    found = trace()
    assert [r.get("tags") for r in only(found, "B")] == [["gc"], None]
    assert [r.get("tags") for r in only(found, "E")] == [["gc", "eval"], None]
    assert [(r["step"], r["args"]) for r in only(found, "i", "relative_step")] == [
        (101, {"relative_step": 1}), (103, {"relative_step": 103})]


def test_tasks_have_tags_of_their_own(trace):
    import asyncio
    set_step(42)
    tracing.add_step_tag("global")

    async def task(tag):
        assert tracing.get_step_tags() == ("global",)
        tracing.add_step_tag(tag)
        await asyncio.sleep(0.01)
        return tracing.get_step(), tracing.get_step_tags()

    async def main():
        return await asyncio.gather(asyncio.ensure_future(task("a")), asyncio.ensure_future(task("b")))
    assert asyncio.run(main()) == [(42, ("a",)), (42, ("b",))]
    assert tracing.get_step_tags() == ("global",)
    tracing.clear_step_tags()
    assert tracing.get_step_tags() == ()


# ---- Values ----

class Numpyish:
    """A scalar as NumPy's and torch's are, seen from a file that imports neither."""
    shape = ()

    def __init__(self, value):
        self.value = value

    def __float__(self):
        return float(self.value)

    def item(self):
        return self.value


class Rude:
    def __str__(self):
        raise RuntimeError("no text for you")

    __repr__ = __str__


def cyclic():
    value = [1]
    value.append(value)
    return value


@pytest.mark.parametrize("value, wanted", [
    (float("nan"), "NaN"), (float("inf"), "Infinity"), (-math.inf, "-Infinity"), (1.5, 1.5), (True, True),
    (None, None), (2**64 - 1, 2**64 - 1), (10**30, hex(10**30)), (Decimal("1.25"), 1.25),
    (Decimal("NaN"), "NaN"), (Fraction(1, 4), 0.25), (b"\xffab", "\\xffab"), (bytearray(b"x"), "x"),
    ({3}, [3]), (frozenset(), []), ((1, 2), [1, 2]), ({1: 2}, {"1": 2}), (Numpyish(3), 3),
    (Numpyish(float("nan")), "NaN"), ("\ud800x", "\ufffdx"), ("a\u2028\x00\nb\"\\", "a\u2028\x00\nb\"\\"),
    ("\U0001f600", "\U0001f600"), (Rude(), "<Rude: RuntimeError>"), (3 + 4j, "(3+4j)"),
    (range(2), "range(0, 2)")])
def test_any_value_becomes_strict_json(trace, value, wanted):
    log_trace_instant("value", {"value": value})
    found, = only(trace(), "i", "value")
    assert found["args"] == {"value": wanted} and type(found["args"]["value"]) is type(wanted)


def test_scalars_of_numpy_and_torch_are_numbers(trace):
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    log_trace_scalar({"f16": numpy.float16(0.5), "i64": numpy.int64(7), "long": numpy.longdouble(0.25),
                      "0d": numpy.array(2.0), "tensor": torch.tensor(1.5), "int": torch.tensor(3),
                      "grad": torch.tensor(2.0, requires_grad=True), "nan": torch.tensor(math.nan),
                      "bf16": torch.tensor(1.0, dtype=torch.bfloat16)})
    log_trace_instant("tensors", {"t": torch.zeros(3), "dtype": torch.float32, "a": numpy.arange(2)})
    found = trace()
    assert only(found, "C")[0]["args"] == {"f16": 0.5, "i64": 7, "long": 0.25, "0d": 2.0, "tensor": 1.5,
                                           "int": 3, "grad": 2.0, "nan": "NaN", "bf16": 1.0}
    assert only(found, "i", "tensors")[0]["args"]["dtype"] == "torch.float32"


def test_cycles_giants_and_long_names_are_cut_and_marked(trace):
    log_trace_instant("cycle", {"value": cyclic()})
    log_trace_instant("giant", {"value": list(range(10**6)), "int": 10**5000})
    log_trace_instant("n" * 2**20)
    with log_trace_span("s" * 2**20, args={"text": "t" * 2**20}):
        pass
    log_trace_scalar({"c" * 2**20: 1})
    found = trace()
    assert max(len(str(r)) for r in found) < 20_000
    name = only(found, "B")[0]["name"]
    assert name == "s" * 1000 + "... (cut, 1048576 characters)" == only(found, "E")[0]["name"]
    assert only(found, "i", "n" * 1000 + "... (cut, 1048576 characters)")
    assert "cut" in str(only(found, "i", "cycle")[0]["args"])


def test_names_of_any_kind(trace):
    import enum

    class Phase(enum.Enum):
        FORWARD = "forward"
    for name in (Phase.FORWARD, 3, None, ["unhashable"], Rude(), ""):
        with log_trace_span(name):
            log_trace_instant(name)
    assert [r["name"] for r in only(trace(), "B")] == [
        "Phase.FORWARD", "3", "None", "['unhashable']", "<Rude: RuntimeError>", ""]


def test_many_different_names_do_not_pile_up(trace):
    for i in range(10_000):
        with log_trace_span(f"name {i}"):
            pass
    found = trace()
    assert len(only(found, "B")) == len(only(found, "E")) == 10_000


def test_what_is_no_number_is_skipped_with_one_warning(trace, caplog):
    for _ in range(3):
        log_trace_scalar({"good": 1, "text": "1", "list": [1], "none": None, "flag": True, "huge": 10**30})
    assert [r["args"] for r in only(trace(), "C")] == [{"good": 1, "huge": hex(10**30)}] * 3
    warnings = [r.getMessage() for r in caplog.records if "want a number" in r.getMessage()]
    assert len(warnings) == 1 and "'text' is str" in warnings[0]


def test_nothing_raises_whatever_is_passed(trace):
    log_trace_scalar(None)
    log_trace_scalar({})
    log_trace_instant("x", 5)
    log_trace_instant("x", {Rude(): Rude()})
    with log_trace_span("x", args=7, stacklevel=0):
        pass
    with log_trace_span("y", args=[1, 2], stacklevel="deep"):
        pass
    trace()


# ---- On and off ----

def test_before_init_and_after_close_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with log_trace_span("x") as span:
        span.ready()
        log_trace_scalar({"a": 1})
        log_trace_instant("b")
    tracing.close_structured_logger()
    tracing.init_structured_logger("test", tmp_path / "off", enable=False)
    with log_trace_span("x"):
        log_trace_instant("b")
    tracing.close_structured_logger()
    assert list(tmp_path.iterdir()) == []


def test_a_second_init_with_other_arguments_says_so(tmp_path):
    tracing.init_structured_logger("test", tmp_path, heartbeat_s=0, stall_timeout_s=0)
    try:
        with pytest.raises(ValueError,
                           match=r"other arguments \(heartbeat_s=0, now 3\); call close_structured_"):
            tracing.init_structured_logger("test", tmp_path, heartbeat_s=3, stall_timeout_s=0)
    finally:
        tracing.close_structured_logger()
    tracing.init_structured_logger("test", tmp_path, heartbeat_s=3, stall_timeout_s=0)
    tracing.close_structured_logger()
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("settings, wanted", [
    ({"heartbeat_s": -1}, "heartbeat_s=-1, want a number from 0"),
    ({"max_file_size_mb": 0}, "max_file_size_mb=0, want a number from 0.01"),
    ({"backup_count": "3"}, "backup_count='3', want"), ({"stall_timeout_s": math.nan}, "stall_timeout_s=nan"),
    ({"backup_count": 1.5}, "backup_count=1.5, want a whole number"), ({"rank": -1}, "rank=-1, want"),
    ({"rank": "0"}, "rank='0', want"), ({"source": "a/b"}, "source='a/b', want"),
    ({"source": ""}, "source='', want")])
def test_settings_that_make_no_sense(tmp_path, settings, wanted):
    with pytest.raises(ValueError) as error:
        tracing.init_structured_logger(**{"source": "test", "output_dir": tmp_path, **settings})
    assert wanted in str(error.value)
    assert list(tmp_path.iterdir()) == []


# ---- Who a process is ----

WHO = """
import tracing
tracing.init_structured_logger("who", "logs", heartbeat_s=0, stall_timeout_s=0)
"""


@pytest.mark.parametrize("variables, wanted", [
    ({}, (0, 0, 1, 0, 0, None)),
    (dict(RANK=5, LOCAL_RANK=1, WORLD_SIZE=8, GROUP_RANK=1, TORCHELASTIC_RESTART_COUNT=2,
          TORCHELASTIC_RUN_ID="job",
          SLURM_PROCID=0, SLURM_NTASKS=2), (5, 1, 8, 1, 2, "job")),
    (dict(SLURM_PROCID=3, SLURM_LOCALID=1, SLURM_NTASKS=4, SLURM_NODEID=1, SLURM_JOB_ID=77),
     (3, 1, 4, 1, 0, "77")),
    (dict(SLURM_PROCID=0, SLURM_NTASKS=8, SLURM_STEP_NUM_TASKS=1, SLURM_JOB_ID=77), (0, 0, 1, 0, 0, "77")),
    (dict(OMPI_COMM_WORLD_RANK=2, OMPI_COMM_WORLD_LOCAL_RANK=0, OMPI_COMM_WORLD_SIZE=4),
     (2, 0, 4, 0, 0, None)),
    (dict(RANK="x", WORLD_SIZE=2), (0, 0, 1, 0, 0, None))])
def test_rank_and_run_from_the_launcher(tmp_path, variables, wanted):
    ran(tmp_path, WHO, env=environment(**variables))
    path, = files(tmp_path / "logs")
    header = records(path)[0]
    assert tuple(header[k] for k in ("rank", "local_rank", "world_size", "node", "attempt", "run")) == wanted
    assert path.name.startswith(f"who.rank{wanted[0]:05d}.") and path.name.endswith(f".{header['pid']}.jsonl")


LATE = """
import torch, torch.testing._internal.distributed.fake_pg, tracing
tracing.init_structured_logger("late", "logs", heartbeat_s=0, stall_timeout_s=0)
with tracing.log_trace_span("startup"):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("fake", rank=3, world_size=8, store=store)
    tracing.set_step(1)
    with tracing.log_trace_span("step"):
        pass
tracing.close_structured_logger()
"""


def test_a_rank_that_becomes_known_late_goes_on_in_its_own_file(tmp_path):
    pytest.importorskip("torch")
    done = program(tmp_path, LATE, env=environment())
    assert done.returncode == 0, done.stderr
    first, second = files(tmp_path / "logs")
    assert records(first)[0]["rank"] == 0
    found = records(second)
    assert found[0]["rank"] == 3 and found[0]["world_size"] == 8 and found[0]["continues"] == first.name
    assert [(r["ph"], r["name"]) for r in found if r["ph"] in "BE"] == [
        ("B", "startup"), ("B", "step"), ("E", "step"), ("E", "startup")]


def test_more_than_256_ranks_have_a_folder_for_each_256(tmp_path):
    for rank in (0, 255, 256, 511):
        ran(tmp_path, WHO, env=environment(RANK=rank, WORLD_SIZE=512, LOCAL_RANK=0))
    assert [str(p.parent.relative_to(tmp_path)) for p in files(tmp_path / "logs")] == [
        "logs/ranks00000-00255"] * 2 + ["logs/ranks00256-00511"] * 2


# ---- Beside torchtitan, under torch.compile, on other interpreters ----

def test_torchtitans_trainer_runs_on_this_logger(tmp_path, trace):
    """The calls of torchtitan's trainer, validator and garbage collector, in order, with their arguments."""
    titan = pytest.importorskip("torchtitan.observability.structured_logger")
    titan.init_structured_logger(source="training", output_dir=str(tmp_path / "titan"), rank=0, enable=True)
    trace()
    tracing.init_structured_logger(source="training", output_dir=str(tmp_path / "ours"), rank=0, enable=True)
    for logger in (titan, tracing):
        train_as_torchtitan_does(logger)
    tracing.close_structured_logger()
    ours = all_records(tmp_path / "ours")
    theirs = [__import__("json").loads(line) for path in files(tmp_path / "titan") for line in open(path)]
    ended = [(r["log_type_name"][:-4], r.get("step"), r.get("step_tags")) for r in theirs
             if r["log_type_name"].endswith("_end")]
    assert [(r["name"], r.get("step"), r.get("tags")) for r in only(ours, "E")] == ended
    assert [(k, v) for r in only(ours, "C") for k, v in r["args"].items()] == [
        (r["event_name"], r["value"]) for r in theirs if r["log_type_name"] == "metric_value"]
    assert {r["name"] for r in only(ours, "i")} >= {"structured_logger_started", "training_start"}
    assert [r["err"] for r in only(ours, "E") if "err" in r] == ["ValueError: no data"]


def train_as_torchtitan_does(sl):
    sl.log_trace_instant("structured_logger_started")

    class Config:
        def build(self):
            with sl.log_trace_span(f"{type(self).__qualname__}.build"):
                return self

    class Trainer:
        @sl.log_trace_span("torch_distributed_init")
        def init_distributed(self):
            return "mesh"

        @sl.log_trace_span("fwd_bwd")
        def forward_backward(self, *, batch):
            return batch * 2

        @sl.log_trace_span("eval")
        def validate(self):
            sl.add_step_tag("eval")

        @sl.log_trace_span("gc_collect")
        def collect(self):
            sl.add_step_tag("gc")

    trainer = Trainer()
    assert trainer.init_distributed() == "mesh"
    Config().build()
    sl.log_trace_instant("training_start")
    loaded_step = 10
    for step in range(loaded_step + 1, loaded_step + 4):
        sl.set_step(step, relative_step=step - loaded_step)
        trainer.collect()
        with sl.log_trace_span("step"):
            with sl.log_trace_span("fetching_batch"):
                batch = 2
            sl.log_trace_scalar({"local_valid_tokens": int(batch)})
            assert trainer.forward_backward(batch=batch) == 4
            with sl.log_trace_span("optim", "the optimizer", stacklevel=2):
                pass
            sl.log_trace_scalar({"global_valid_tokens": 8, "loss": 0.5}, stacklevel=2)
        trainer.validate()
        assert sl.get_step() == step and sl.get_relative_step() == step - loaded_step
        assert set(sl.get_step_tags()) == {"gc", "eval"}
    try:
        with sl.log_trace_span("fetching_batch"):
            raise ValueError("no data")
    except ValueError:
        pass
    sl.clear_step_tags()


COMPILED = """
import torch, tracing

@tracing.log_trace_span("decorated")
def inner(x):
    return x * 2

@torch.compile(fullgraph=True, backend="eager")
def model(x):
    with tracing.log_trace_span("inside", sync=True) as span:
        y = x + 1
        span.ready()
    tracing.log_trace_scalar({"a": 1.0})
    tracing.log_trace_instant("b")
    tracing.set_step(5)
    tracing.add_step_tag("t")
    return inner(y)

for on in (False, True):
    if on:
        tracing.init_structured_logger("compiled", "logs", heartbeat_s=0, stall_timeout_s=0)
    torch._dynamo.reset()
    with tracing.log_trace_span("compile"):
        assert model(torch.ones(2)).tolist() == [4.0, 4.0]
assert tracing.get_step() is None
tracing.close_structured_logger()
"""


def test_under_torch_compile_calls_do_nothing(tmp_path):
    pytest.importorskip("torch")
    done = program(tmp_path, COMPILED, env=environment())
    assert done.returncode == 0, done.stderr
    assert [(r["ph"], r["name"]) for r in all_records(tmp_path / "logs") if r["ph"] in "BEi"] == [
        ("B", "compile"), ("E", "compile"), ("i", "process_end")]


EVERYTHING = """
import asyncio, os, sys, threading, tracing
from tracing import *
assert "torch" not in sys.modules and "numpy" not in sys.modules
init_structured_logger("training", "logs", heartbeat_s=0.05, stall_timeout_s=60)
for step in range(20):
    set_step(step)
    with log_trace_span("step"):
        with log_trace_span("backward", sync=True) as span:
            span.ready()
        log_trace_scalar({"loss": 1.0 / (step + 1), "nan": float("nan")})
    thread = threading.Thread(target=log_trace_span("thread")(lambda: None))
    thread.start()
    thread.join()

@log_trace_span("generator")
async def generator():
    yield 1

async def main():
    async for _ in generator():
        await asyncio.sleep(0.2)
asyncio.run(main())
pid = os.fork()
with log_trace_span("both"):
    pass
if pid == 0:
    sys.exit(7)
assert os.waitpid(pid, 0)[1] == 7 << 8
close_structured_logger()
print("end")
"""


@pytest.mark.parametrize("minor", range(8, 15))
def test_alone_in_a_folder_on_every_python(tmp_path, minor):
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"no python3.{minor}")
    done = program(tmp_path, EVERYTHING, python=python, env=environment(PYTHONWARNINGS="ignore"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
    parent, child = sorted((records(p) for p in files(tmp_path / "logs")), key=len, reverse=True)
    assert parent[0]["versions"]["python"].startswith(f"3.{minor}.")
    assert [len(only(parent, *what)) for what in (("B", "step"), ("E", "step"), ("i", "ready"))] == [20] * 3
    assert len(only(parent, "B", "thread")) == 20 and len(only(parent, "E", "generator")) == 1
    assert only(parent, "i", "heartbeat") and only(parent, "i", "process_end")[0]["args"] == {"how": "ok"}
    assert child[0]["worker"] == "fork" and child[0]["parent"] == parent[0]["pid"]
    assert [r["ph"] for r in child if r.get("name") == "both" and r["ph"] in "BE"] == ["B", "E"]
    assert only(child, "i", "process_end")[0]["args"] == {"how": "exit", "code": 7}
    assert {p.suffix for p in (tmp_path / "logs").iterdir()} == {".jsonl"}   # no empty files of stacks


def test_the_file_imports_nothing_but_the_standard_library():
    source = importlib.util.find_spec("tracing").origin
    done = subprocess.run([sys.executable, "-I", "-S", "-c", f"import runpy; runpy.run_path({source!r})"],
                          capture_output=True)
    assert done.returncode == 0, done.stderr
