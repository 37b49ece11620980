"""Promise: a site profile is read as it says, or refused in one line with file, line and field."""

import re
from pathlib import Path

import pytest

from harness.cell import Cell
from harness.errors import SiteError
from harness.launchers import LAUNCHERS, slurm_profile
from harness.launchers.launch import Launch
from harness.launchers.ranks.watching import Stop, stop_request
from harness.launchers.site_profile import Site, read_site
from harness.launchers.slurm.job_layout import lay_out
from harness.launchers.slurm_profile import SlurmProfile
from harness.runs.store import Attempt, sweep_folder

BY_SIZE = "timeout_minutes: {16: 1200, 256: 120}\n"
SLURM = "launcher: slurm\nslurm: {ranks_per_node: 4}\n"


@pytest.fixture
def read(tmp_path):
    def of(text):
        path = tmp_path / "here.yaml"
        path.write_text(text)
        return read_site(str(path))

    return of


def cell(world_size, seed=0):
    return Cell.model_validate({
        "sweep": "study", "method": "sgd", "world_size": world_size, "seed": seed, "workload": "digits",
        "target": {"metric": "accuracy", "at_least": 0.9}, "optimizer": {"lr": 0.1},
        "training": {"local_batch_size": 1, "epochs": 1},
    })  # fmt: skip


def test_a_limit_by_world_size_holds_up_to_the_next_size(read):
    site = read(BY_SIZE + SLURM)
    assert [site.limit_minutes(size) for size in (16, 17, 255, 256, 1024)] == [1200, 1200, 1200, 120, 120]
    minutes = {
        layout.world_size: layout.minutes(site) for layout in lay_out([(0, cell(16)), (1, cell(256))], site)
    }
    assert minutes == {16: 1202, 256: 122}
    cost = LAUNCHERS["slurm"].estimate_cost([cell(16), cell(16, 1), cell(256)], site)
    assert cost.core_hours == pytest.approx((2 * 16 * 1202 + 256 * 122) / 60)
    local = Site(name="here", timeout_minutes={1: 30.0, 2: 6.0})
    assert LAUNCHERS["local"].estimate_cost([cell(1), cell(4)], local).core_hours == pytest.approx(0.5 + 0.4)


@pytest.mark.parametrize("launcher", ["slurm", "local"])
def test_a_world_smaller_than_every_listed_one_is_refused_before_anything_is_written(read, launcher):
    site = read(BY_SIZE + (SLURM if launcher == "slurm" else ""))
    expected = r"site here has no timeout_minutes for a world size of 8, only from 16 up \(16, 256\): add one"
    with pytest.raises(SiteError, match=expected):
        LAUNCHERS[launcher].check(cell(8), site)


@pytest.mark.slurm
def test_every_option_of_sbatch_is_taken_or_refused_by_its_own_name(cluster):
    options = set(re.findall(r"(?<!\S)--([a-z][a-z-]+)", cluster.run("sbatch", "--help")))
    profiles = {name: SlurmProfile(ranks_per_node=4, sbatch={name: "1"}) for name in options}
    refused = {name for name, profile in profiles.items() if list(profile.refused())}
    assert refused == options & {*slurm_profile.FIELDS, *slurm_profile.RESERVED, *slurm_profile.WHOLE_NODES}
    assert {"begin", "mem-per-cpu", "nice", "reservation"} < options - refused


def test_gpus_are_requested_with_their_type_and_beside_other_resources(read):
    site = read(
        "launcher: slurm\ngpus_per_rank: 1\nslurm: {ranks_per_node: 4, gpus_by: gres, gpu_type: a100, "
        'sbatch: {gres: "lustre:1"}}\n'
    )
    assert "#SBATCH --gres=gpu:a100:4,lustre:1" in LAUNCHERS["slurm"].preview(
        sweep_folder("study", Path("runs")), [cell(4)], site
    )


def test_a_stored_launch_keeps_its_site_without_fields_that_are_gone(read, tmp_path):
    attempt = Attempt(tmp_path)
    planned = LAUNCHERS["slurm"].plan(cell(16), read(BY_SIZE + SLURM))
    stored = planned.to_dict()
    stored["site"]["slurm"]["wckey"] = "k"  # as version 0.1.0 wrote it
    attempt.write("launch.json", stored)
    assert Launch.read(attempt) == planned
    stored["site"]["slurm"]["sbatch"] = {"exclusive": None}  # which new profiles may not have
    attempt = Attempt(tmp_path / "other")
    attempt.path.mkdir()
    attempt.write("launch.json", stored)
    assert Launch.read(attempt).site.slurm.sbatch == {"exclusive": None}


def test_ranks_are_asked_to_save_before_the_limit_of_their_world_size(tmp_path):
    site = Site(name="here", timeout_minutes={1: 60.0, 8: 2.0}, grace_seconds=90)
    assert [site.save_seconds(size) for size in (1, 8)] == [90, 60]
    asked = [stop_request(Attempt(tmp_path), 60.0, left, preempted=False) for left in (61, 59, -1)]
    assert asked == [None, Stop("timeout", save=True), Stop("timeout", save=False)]


SIGNAL = (
    "launcher: slurm\ntimeout_minutes: 20\ngrace_seconds: 60\nslurm:\n  ranks_per_node: 4\n  signal_seconds: "
)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "timeout_minutes: true\n",
            "1: timeout_minutes must be a number > 0, or such numbers by world",
        ),
        ("timeout_minutes: {}\n", "1: timeout_minutes must have a limit for at least one world size"),
        (
            "timeout_minutes: {0: 5}\n",
            "1: timeout_minutes must have world sizes as keys, whole numbers >= 1",
        ),
        ("timeout_minutes: {16: -5}\n", "1: timeout_minutes must be a number > 0, got -5 for world size 16"),
        (
            f"{SIGNAL}180\n",
            "6: slurm.signal_seconds=180 cannot act: ranks are asked to save 180 s",
        ),
        (f"{SIGNAL}1200\n", "6: slurm.signal_seconds=1200 would end a job as soon as it starts"),
        (
            "timeout_minutes: {1: 60, 8: 2}\ngrace_seconds: 61\n",
            "2: grace_seconds=61 is more than half of timeout_minutes=2",
        ),
        ("timeout_minutes: 9\npeer_minutes: 10\n", "2: peer_minutes=10 cannot act: an attempt ends after"),
        (
            "launcher: slurm\nmax_continuations: 3\nslurm: {ranks_per_node: 4, requeue: false}\n",
            "2: max_continuations=3 cannot act with slurm.requeue=false",
        ),
        (
            "launcher: slurm\nslurm: {ranks_per_node: 4, wckey: k}\n",
            "2: slurm.wckey is not a key of a site's slurm section; allowed: ranks_per_node, partition",
        ),
        ("backend: nccl\n", "1: backend=nccl moves GPU memory; set gpus_per_rank: 1"),
        ("backend: gloo\ngpus_per_rank: 1\n", "1: backend=gloo moves CPU memory; set gpus_per_rank: 0"),
        ("launch_prefix: [apptainer, '']\n", "1: launch_prefix='' is a word that is empty"),
        ('environment: {"A=B": "1"}\n', "1: environment='A=B' is no name of a variable"),
        ('environment: {"A": "x\\0y"}\n', "1: environment.A='x\\x00y' contains NUL"),
        (
            "launcher: slurm\nslurm: {ranks_per_node: 4, sbatch: {time: 30}}\n",
            "2: slurm.sbatch.time is set by timeout_minutes: change that, and remove this",
        ),
        (
            "launcher: slurm\nslurm: {ranks_per_node: 4, mpi: pmix-v4}\n",
            "2: slurm.mpi='pmix-v4' must have lower-case letters, digits and '_' only",
        ),
        (
            "launcher: slurm\nslurm: {ranks_per_node: 4, sbatch: {array: 1}}\n",
            "2: slurm.sbatch.array is set by slurm.at_once",
        ),
        *(
            (f"launcher: slurm\nslurm:\n  ranks_per_node: 4\n  {option}\n", f"4: slurm.{sentence}")
            for option, sentence in (
                ("sbatch: {exclusive: null}", "sbatch.exclusive is set by slurm.exclusive"),
                ("sbatch: {exclusi: null}", "sbatch.exclusi is set by slurm.exclusive"),
                ("sbatch: {gpus: 2}", "sbatch.gpus is set by gpus_per_rank"),
                (
                    'sbatch: {gres: "gpu:3"}',
                    "sbatch.gres=gpu:3 requests GPUs, set by gpus_per_rank",
                ),
                ("sbatch: {cpus-per-task: 2}", "sbatch.cpus-per-task is set by cpus_per_rank"),
                ("sbatch: {no-requeue: null}", "sbatch.no-requeue is set by slurm.requeue"),
                ("sbatch: {exclude: n1}", "sbatch.exclude is set by slurm.exclude_nodes"),
                (
                    "sbatch: {test-only: null}",
                    "sbatch.test-only must be the long name of an option",
                ),
                (
                    "sbatch: {n: 4}",
                    "sbatch.n must be the long name of an option of sbatch",
                ),
                ("sbatch: {core-spec: 1}", "sbatch.core-spec takes whole nodes: set slurm.exclusive: true"),
                ("exclusive: true", "exclusive=true needs cpus_per_node, to count what a job holds"),
                (
                    'srun: ["--label", "--export=NONE"]',
                    "srun[1]=--export=NONE must not be one of",
                ),
            )
        ),
        (
            'launcher: slurm\nslurm: {ranks_per_node: 4, partition: "a\\nb"}\n',
            "2: slurm.partition='a\\nb' has a line break or a quote",
        ),
    ],
)
def test_what_no_site_can_have_or_what_cannot_act_is_refused(read, tmp_path, text, sentence):
    with pytest.raises(SiteError) as error:
        read(text)
    assert str(error.value).startswith(f"{tmp_path / 'here.yaml'}:{sentence}")


@pytest.mark.parametrize(
    "text",
    [
        f"{SIGNAL}181\n",
        "timeout_minutes: {1: 60, 8: 20}\ncheckpoint_every_minutes: 30\n",
        "timeout_minutes: 2\ngrace_seconds: 60\n",  # defaults that are longer stand
        'environment: {NCCL_DEBUG: "a=b", EMPTY: ""}\n',
    ],
)
def test_what_can_act_is_read(read, text):
    assert read(text).launcher in ("local", "slurm")
