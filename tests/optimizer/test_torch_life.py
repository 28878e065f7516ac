"""`InterleavedAdamW` beside what scripts do to it: closed twice, dropped, unfrozen parameters, several ranks."""

import gc
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deep_offload.optimizer.torch import InterleavedAdamW
from tests.optimizer.torch_cases import loss_of, make_model, offload


@pytest.fixture(autouse=True)
def profile(tmp_path_factory, monkeypatch):
    """Rates are measured once for all tests here."""
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def lanes() -> int:
    return sum(thread.name.startswith("offload-") for thread in threading.enumerate())


def built(**options):
    model = make_model(torch.float32)
    return model, InterleavedAdamW(model.parameters(), lr=0.1, offload=offload(), **options)


def test_a_closed_optimizer_says_so():
    """Closing twice does no harm; later use ends at once, in a sentence; the parameters go on without it."""
    gc.collect()  # what earlier tests have left
    before = lanes()
    model, optimizer = built(flush_in_backward=True)
    loss_of(model, 0).backward()
    optimizer.step()
    assert lanes() > before
    optimizer.close()
    optimizer.close()
    assert lanes() == before
    for use in (optimizer.step, optimizer.state_dict, optimizer.synchronize, optimizer.refresh_masters):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    weight = model[0].weight.detach().clone()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (1, 2):
        other.zero_grad()
        loss_of(model, step).backward()
        other.step()
    assert not torch.equal(weight, model[0].weight)


def test_an_optimizer_that_nobody_holds_is_released():
    """Its threads end and its state goes, also where a scheduler ties it into a cycle; the model stays usable."""
    gc.collect()
    before = lanes()
    for is_scheduled in (False, True):
        model, optimizer = built()
        if is_scheduled:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loss_of(model, 0).backward()
        optimizer.step()
        if is_scheduled:
            scheduler.step()
            del scheduler
        assert lanes() > before
        del optimizer
        gc.collect()
        deadline = time.monotonic() + 10
        while lanes() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lanes() == before
        loss_of(model, 1).backward()


def test_a_forked_process_does_not_release():
    """It has no lanes to wait for: the collector's call returns there, and the parent's optimizer goes on."""
    model, optimizer = built()
    child = os.fork()
    if child == 0:
        optimizer._release()
        os._exit(7)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended[0] == child and os.waitstatus_to_exitcode(ended[1]) == 7
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.close()


def test_a_gradient_that_a_frozen_parameter_has_left_is_nobodys():
    """Left from an earlier phase: it is not updated, and no reason to stop."""
    model = make_model(torch.float32)
    loss_of(model, 0).backward()
    model[0].weight.requires_grad_(False)
    weight = model[0].weight.clone()
    optimizer = InterleavedAdamW(model.parameters(), lr=0.1, offload=offload())
    loss_of(model, 1).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, weight)
    optimizer.close()


def test_a_parameter_unfrozen_later_is_refused():
    """It has no state and would never be trained; one that is frozen later keeps its value."""
    model = make_model(torch.float32)
    model[0].weight.requires_grad_(False)
    optimizer = InterleavedAdamW(model.parameters(), lr=0.1, offload=offload())
    model[2].weight.requires_grad_(False)
    frozen = [model[0].weight.clone(), model[2].weight.clone()]
    loss_of(model, 0).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, frozen[0]) and torch.equal(model[2].weight, frozen[1])
    model[0].weight.requires_grad_(True)
    loss_of(model, 1).backward()
    with pytest.raises(ValueError, match=r"shape \(40, 24\) has a gradient, but it was frozen when the optimizer was"):
        optimizer.step()
    optimizer.close()


def test_nothing_to_train():
    """Without a parameter that takes gradients a step clips and updates nothing."""
    model = make_model(torch.float32)
    model.requires_grad_(False)
    optimizer = InterleavedAdamW(model.parameters(), offload=offload(), max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.last_grad_norm == 0.0
    optimizer.close()


def test_sparse_gradients_are_refused_in_a_sentence():
    """By the step, not by a failing copy in backward."""
    model = nn.Embedding(10, 8, sparse=True)
    optimizer = InterleavedAdamW(model.parameters(), offload=offload())
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"shape \(10, 8\) is sparse"):
        optimizer.step()
    optimizer.close()


def test_several_ranks_turn_early_flushes_off(monkeypatch):
    """What ranks reduce behind backward is what is updated from: nothing is flushed before, which is said once."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    ends = []
    for early in (False, True):
        model, optimizer = built(flush_in_backward=early)
        for step in range(2):
            optimizer.zero_grad()
            if early and step == 0:
                with pytest.warns(UserWarning, match="flush_in_backward is off: gradients of 2 ranks"):
                    loss_of(model, step).backward()
            else:
                loss_of(model, step).backward()
            for p in model.parameters():
                p.grad.data.mul_(-2.0)  # as a collective does: no version is counted
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
