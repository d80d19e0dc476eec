"""train.py with TraceML's marks, for the comparison: `traceml run traceml_job.py --nproc-per-node 2 --args
RECIPE ...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import traceml_ai as traceml  # noqa: E402

import train  # noqa: E402

traceml.init(mode="auto")
make_step = train.Trainer.train_step


def traced_step(self, batches):
    with traceml.trace_step(self.model):
        return make_step(self, batches)


train.Trainer.train_step = traced_step
train.RECIPE = train.load_recipe(sys.argv[1:])
train.main()
