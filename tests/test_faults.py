"""The fault suite, one test a scenario: real torchrun jobs, broken on purpose. See
tests/faults/scenarios.py."""

import sys

import pytest
from conftest import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "faults")]

import run as suite  # noqa: E402
import scenarios  # noqa: E402

pytestmark = pytest.mark.long
SLOW = [(job, case.name) for job, settings in scenarios.SLOW_JOBS.items() for case in settings.cases]
STOPS = [case for case in scenarios.STOPS + scenarios.STALLS]


@pytest.fixture(scope="module")
def slow_jobs(tmp_path_factory):
    """Each job runs once, when its first scenario is asked for."""
    results = {}

    def result_of(job, name):
        if job == "torchtitan":
            pytest.importorskip("torchtitan.observability")
        if job not in results:
            results[job] = {row[0]: row[1:] for row in suite.run_slow(job, tmp_path_factory.mktemp(job))}
        return results[job][f"{job}/{name}"]

    return result_of


@pytest.mark.parametrize("job, name", SLOW, ids=[f"{job}-{name}" for job, name in SLOW])
def test_slow(slow_jobs, job, name):
    problem, details = slow_jobs(job, name)
    if problem and not details["decidable"]:
        pytest.skip(f"not decidable here: steps without a fault differ by {details['spread_ms']:.0f} ms; "
                    f"{problem}")
    assert problem is None, f"{problem}; got {details['got']}\n{details['findings']}"


@pytest.mark.parametrize("case", STOPS, ids=[case.name for case in STOPS])
def test_stop(case, tmp_path):
    with suite.memory_cgroup() as has_cgroup:
        if case.name == "memory_cgroup" and not has_cgroup:
            pytest.skip("memory cgroups cannot be made here")
        problem, details = suite.run_stop(case, tmp_path)
    assert problem is None, f"{problem}; got {details['got']}\n{details['findings']}"
