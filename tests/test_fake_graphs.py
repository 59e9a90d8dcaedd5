"""The CUDA graphs of the tests behave like CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from fake_graphs import RecordingError, install

from lagrpo.backends.cuda import record


@pytest.fixture
def device(monkeypatch):
    return install(monkeypatch.setattr)


def test_a_replay_does_the_work_again_on_what_its_memory_holds_now_and_overwrites_its_output(device):
    x, weight, cache = torch.tensor([1.0, 2.0]), torch.nn.Parameter(torch.ones(2)), torch.zeros(2)

    def compute():
        y = x * weight
        cache.add_(y)
        return y.sum(-1, keepdim=True)

    with torch.no_grad():
        replay = record(compute)
    cache.zero_()
    first = replay()
    assert (first.tolist(), cache.tolist()) == ([3.0], [1.0, 2.0])
    x.copy_(torch.tensor([5.0, 5.0]))
    second = replay()
    assert second.data_ptr() == first.data_ptr()
    assert (first.tolist(), cache.tolist()) == ([10.0], [6.0, 7.0])
    weight.data = torch.zeros(2)  # other memory: the recording does not know of it
    assert replay().tolist() == [10.0]


def test_a_recording_changes_nothing_and_its_output_is_not_there_before_a_replay(device):
    x, made, graph = torch.zeros(3), [], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.append(x.add_(1) * 2)
    assert x.tolist() == [0.0, 0.0, 0.0]
    assert made[0].isnan().all()
    graph.replay()
    assert made[0].tolist() == [2.0, 2.0, 2.0]


def test_python_is_not_run_again(device):
    """What Python decided at the recording is decided for good."""
    x, factor = torch.ones(1), [2.0]
    replay = record(lambda: x * factor[0])
    factor[0] = 3.0
    assert replay().tolist() == [2.0]


@pytest.mark.parametrize(
    "sync",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.numpy(),
        lambda x: 1 if x.sum() > 0 else 0,
        lambda x: int(x.max()),
        lambda x: float(x.max()),
        lambda x: range(x.long().sum()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1.0]) + x,
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_what_reads_or_writes_numbers_on_the_host_cannot_be_recorded(device, sync):
    x = torch.ones(2)
    sync(x)
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        record(lambda: (sync(x), x)[1])


def test_streams_wait_for_each_other(device):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        pass
    with pytest.raises(RecordingError, match="does not wait"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass


def test_what_the_host_has_waited_for_needs_no_further_wait(device):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        pass
    side.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass
