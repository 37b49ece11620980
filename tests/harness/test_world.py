"""Promise: a rank computes on the device that its site requests, or reports in one line why it cannot."""

import pytest
import torch

from harness.errors import SiteError
from harness.launchers.launch import Launch
from harness.launchers.site_profile import Site
from harness.runs.store import Attempt
from harness.training.world import join_world


@pytest.fixture
def launched(tmp_path):
    def make(**site):
        launch = Launch(
            launcher="slurm",
            site=Site(name="here", **site),
            cpus_per_rank=1,
            host="h",
            user="u",
            submitted_at=0,
        )
        launch.write(Attempt(tmp_path))
        return Attempt(tmp_path)

    return make


@pytest.fixture
def gpus(monkeypatch):
    """Make torch see so many GPUs."""

    def show(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)

    return show


@pytest.mark.parametrize(("visible", "local_rank"), [(0, 0), (1, 1), (2, 3)])
def test_a_rank_without_the_gpu_that_its_site_requests_does_not_train(launched, gpus, visible, local_rank):
    gpus(visible)
    with pytest.raises(
        SiteError, match=rf"site here .*sees {visible} GPUs and this is local rank {local_rank};"
    ):
        join_world(launched(gpus_per_rank=1), 0, 1, local_rank)


def test_ranks_of_a_node_take_its_gpus_in_order(launched, gpus):
    gpus(2)
    for local_rank in range(2):
        world = join_world(launched(gpus_per_rank=1), 0, 1, local_rank)
        assert (world.device, world.backend) == (torch.device("cuda", local_rank), "nccl")


def test_a_rank_whose_site_requests_no_gpu_uses_none(launched, gpus):
    gpus(2)
    world = join_world(launched(), 0, 1, 0)
    assert (world.device.type, world.backend) == ("cpu", "gloo")
