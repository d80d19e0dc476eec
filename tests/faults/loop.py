"""A training loop that is not train.py, with span names of its own, on tracing.py or on torchtitan's logger.

    torchrun --nproc_per_node 2 loop.py tracing|torchtitan RUN_DIR NUM_STEPS
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

import parts  # noqa: E402


def step_with_tracing(model, optimizer, batches):
    """Spans as in the README: the one in which ranks wait is marked, and tells when own work is done."""
    with log.log_trace_span("get"):
        batch = next(batches).to("cpu")
    with log.log_trace_span("model"):
        loss = model(**batch)["loss"]
    with log.log_trace_span("grads", sync=True) as span:
        loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(span.ready))
        loss.backward()
    with log.log_trace_span("update"):
        optimizer.step()
    optimizer.zero_grad()


def step_with_torchtitan(model, optimizer, batches):
    """The spans of torchtitan's trainer, none of them marked."""
    with log.log_trace_span("fetching_batch"):
        batch = next(batches).to("cpu")
    with log.log_trace_span("fwd_bwd"):
        model(**batch)["loss"].backward()
    with log.log_trace_span("optim"):
        optimizer.step()
    optimizer.zero_grad()


logger, run_dir, num_steps = sys.argv[1:]
if logger == "torchtitan":
    from torchtitan.observability import structured_logger as log

    make_step = step_with_torchtitan
    log.init_structured_logger("training", run_dir)
else:
    import tracing as log

    make_step = step_with_tracing
    log.init_structured_logger("training", f"{run_dir}/structured_logs", stall_timeout_s=10, heartbeat_s=1)

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(parts.Sleeper())
optimizer = parts.SlowSGD(model.parameters(), lr=0.01)
batches = iter(parts.make_loader())
for step in range(1, int(num_steps) + 1):
    log.set_step(step)
    with log.log_trace_span("step"):
        make_step(model, optimizer, batches)
dist.destroy_process_group()
if logger == "tracing":
    log.close_structured_logger()
