"""The simulated device itself: what it forgives less than others, what it counts, and what it refuses."""

import ctypes
import gc
import os
import signal

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils import cpp_extension

import fsharding as fs
from fsharding.base import devices
from fsharding.testing import device_mesh
from tests import sim_device
from tests.on_device import SIM, device_ranks, needs_compiler
from tests.stream_order import violations

pytestmark = [pytest.mark.timeout(1300), needs_compiler]
graphs = pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch before 2.13 has no graphs of accelerators")


@pytest.fixture(scope="module")
def pool():
    with device_ranks(1) as ranks:
        yield ranks


def there(test):
    """Run a function in the process of the device."""

    def run(pool):
        pool.run(test)

    return run


def squared(waits):
    """What a second stream reads of a tensor that the first one writes, and the rows of both."""
    first, side = torch.accelerator.current_stream(), torch.Stream(SIM)
    x = torch.zeros(64, device=SIM)
    torch.accelerator.synchronize()
    with sim_device.log() as log:
        x.add_(3)
        if waits:
            side.wait_stream(first)
        with devices.on_stream(side):
            y = x * x
    torch.accelerator.synchronize()
    return bool((y.cpu() == 9).all()), log.rows


def races():
    sim_device.join()
    for waits in (True, False):
        right = []
        for seed in range(12):
            with sim_device.delays(20_000, seed):  # more than the host needs for a call
                value, rows = squared(waits)
            right.append(value)
            assert bool(violations(rows)) == (not waits), "seen at each try, whether or not the stream was late"
        assert all(right) == waits


def freed():
    """Memory that is taken again is overwritten, in the order of its stream."""
    sim_device.join()
    x = torch.ones(512, device=SIM)
    alias = x.as_strided((512,), (1,))
    place = x.data_ptr()
    del x, alias
    y = torch.empty(512, device=SIM)
    assert y.data_ptr() == place and y.isnan().all().item()


def touched():
    """A host that reads or writes memory of the device by its address is killed; the device's own tasks are not."""
    sim_device.join()
    x = torch.arange(128.0, device=SIM)
    torch.accelerator.synchronize()
    acts = (lambda: ctypes.string_at(x.data_ptr(), 4), lambda: ctypes.memset(x.data_ptr(), 0, 4), lambda: None)
    ends = []
    for act in acts:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # the tests' handler would print every stack
            act()
            os._exit(0)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert ends == [-signal.SIGSEGV, -signal.SIGSEGV, 0]
    assert torch.equal(x.cpu(), torch.arange(128.0))


def pinned():
    """Copies from and to page-locked memory are asynchronous; others wait, and are counted where they happen."""
    sim_device.join()
    host = torch.arange(8.0).pin_memory()
    assert host.is_pinned()
    with sim_device.log() as log:
        x = host.to(SIM, non_blocking=True) * 2
        back = torch.empty(8).pin_memory()
        back.copy_(x, non_blocking=True)
    assert log.reads == []
    torch.accelerator.synchronize()
    assert torch.equal(back, 2 * host)
    with sim_device.log() as log:
        x.sum().item()
        x.cpu()
    assert [read.operator for read in log.reads] == ["aten::_local_scalar_dense", "copy to host"]
    assert all("test_device.py" in read.stack[-1] for read in log.reads)


def limited():
    """A state on the device is as large as its plan says, and an allocation above the limit is refused."""
    sim_device.join()
    # Leaves of multiples of 512 bytes, which the allocator gives.
    config = fs.models.DecoderConfig(vocab_size=64, dim=128, layers=2, heads=4, kv_heads=2, intermediate_size=128)
    model, opt = fs.models.decoder(config), fs.adamw(1e-3)
    mesh = device_mesh(fs.AbstractMesh(("dp",), (1,)), SIM)
    layout = fs.plan_layout(model, mesh, strategy=fs.zero(3), precision=fs.BF16)
    gc.collect()
    before = torch.accelerator.memory_allocated()
    state = fs.init_state(model, opt, fs.random.key(0), layout)
    gc.collect()
    planned = layout.memory(opt)
    on_host = sum(x.nbytes for x in fs.tree.leaves(state.opt_state) if not isinstance(x, DTensor))
    held = torch.accelerator.memory_allocated() - before
    assert held == planned.params + planned.main + planned.opt_state - on_host > 0
    with sim_device.memory_limit(torch.accelerator.memory_allocated() + 512):
        x = torch.empty(128, device=SIM)
        with pytest.raises(torch.OutOfMemoryError, match="bytes left"):
            torch.empty(1, device=SIM)
        del x


def refused():
    """What a graph of CUDA refuses."""
    sim_device.join()
    outside, x = torch.Event(SIM), torch.ones(4, device=SIM)
    outside.record()
    stream, other = torch.Stream(SIM), torch.Stream(SIM)
    cases = {
        "host waits for a stream": lambda: x.sum().item(),
        "event from before it": lambda: stream.wait_event(outside),
        "pageable memory": lambda: x.copy_(torch.zeros(4)),
    }
    for text, act in cases.items():
        with pytest.raises(RuntimeError, match=text), stream, torch.accelerator.Graph():
            act()

    def leaves_work():
        other.wait_stream(stream)
        with other:
            x.add(1)

    with pytest.raises(RuntimeError, match="ends before the work of stream"), stream, torch.accelerator.Graph():
        leaves_work()


def test_a_build_that_fails_says_the_first_error_of_the_compiler(monkeypatch, tmp_path):
    printed = "ninja failed\ndevice.cpp:3:1: error: expected ';'\nFAILED: device.o\ndevice.cpp:9:1: error: another"

    def load(*args, **kwargs):
        raise RuntimeError(printed)

    monkeypatch.setattr(cpp_extension, "load", load)
    monkeypatch.setattr(sim_device, "BUILDS", tmp_path)
    with pytest.raises(RuntimeError) as caught:
        sim_device.start.__wrapped__()
    assert str(caught.value) == "device.cpp:3:1: error: expected ';'"


test_a_second_stream_has_to_wait = there(races)
test_freed_memory_is_overwritten = there(freed)
test_the_host_cannot_touch_memory_of_the_device = there(touched)
test_only_pinned_copies_are_asynchronous = there(pinned)
test_a_state_is_as_large_as_its_plan = there(limited)
test_a_graph_refuses_what_it_cannot_replay = graphs(there(refused))
