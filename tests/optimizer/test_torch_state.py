"""State dicts of `InterleavedAdamW`: what may be loaded, in which order, and what happens to the weights."""

import copy

import pytest
import torch

from deep_offload.optimizer.torch import InterleavedAdamW
from deep_offload.optimizer.torch_state import fingerprint
from tests.optimizer.torch_cases import loss_of, make_model, offload


@pytest.fixture(autouse=True)
def profile(tmp_path_factory, monkeypatch):
    """Rates are measured once for all tests here."""
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def trained(dtype=torch.bfloat16, steps=2, **settings):
    """A model and its optimizer after some steps."""
    model = make_model(dtype)
    optimizer = InterleavedAdamW(model.parameters(), lr=1e-2, offload=offload(**settings))
    go_on(model, optimizer, range(steps))
    return model, optimizer


def go_on(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def same_state(one, other) -> bool:
    return all(
        torch.equal(values, other["state"][number][name])
        for number, state in one["state"].items()
        for name, values in state.items()
    )


@pytest.mark.parametrize("split_master", ["on", "off"])
@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("model_first", [True, False])
def test_weights_and_state_load_in_either_order(split_master, share, model_first):
    """Low bits of masters survive weights that are loaded behind the state; other weights behind it do not."""
    settings = dict(offload_split_master=split_master, offload_gpu_share=share)
    model, optimizer = trained(**settings)
    state, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    go_on(model, optimizer, [7])
    later = make_model()
    resumed = InterleavedAdamW(later.parameters(), lr=1e-2, offload=offload(**settings))
    loads = [lambda: later.load_state_dict(weights), lambda: resumed.load_state_dict(state)]
    for load in loads if model_first else reversed(loads):
        load()
    go_on(later, resumed, [7])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), later.parameters(), strict=True))
    assert same_state(optimizer.state_dict(), resumed.state_dict())
    resumed.load_state_dict(state)
    with torch.no_grad():
        later[2].weight[3, 5] += 0.5
    written = later[2].weight.detach().float().clone()
    resumed.param_groups[0].update(lr=0.0, weight_decay=0.0)
    go_on(later, resumed, [8])
    assert torch.equal(resumed.state_dict()["state"][2]["master"], written)
    for one in (optimizer, resumed):
        one.close()


def test_a_changed_bit_changes_the_fingerprint():
    """Any element, its sign, elements that change places, signs that all change."""
    values = torch.arange(1.0, 9.0).to(torch.bfloat16)
    known = {fingerprint(values)}
    for number in range(8):
        flipped = values.clone()
        flipped[number] = -flipped[number]
        known.add(fingerprint(flipped))
    known |= {fingerprint(values.flip(0)), fingerprint(-values), fingerprint(values[:-1])}
    assert len(known) == 12 and fingerprint(values.clone()) in known
    assert fingerprint(torch.tensor([1.0, 2.0, -3.0])) != fingerprint(torch.tensor([-1.0, -2.0, 3.0]))


def test_refreshed_masters_are_no_longer_those_of_the_state():
    """Weights are exchanged and put back, as to evaluate averaged ones: the next update starts from them."""
    model, optimizer = trained()
    optimizer.load_state_dict(optimizer.state_dict())
    weights = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
        optimizer.refresh_masters()
        for p, weight in zip(model.parameters(), weights, strict=True):
            p.copy_(weight)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    go_on(model, optimizer, [3])
    assert all(torch.equal(p, weight) for p, weight in zip(model.parameters(), weights, strict=True))
    state = optimizer.state_dict()["state"]
    assert all(torch.equal(state[n]["master"], weight.float()) for n, weight in enumerate(weights))
    optimizer.close()


def changed(state, number=0, **values):
    """A copy of a state dict with other values of one parameter; None takes one away."""
    out = copy.deepcopy(state)
    for name, value in values.items():
        if value is None:
            del out["state"][number][name]
        else:
            out["state"][number][name] = value
    return out


def in_group(state, **options):
    out = copy.deepcopy(state)
    out["param_groups"][0].update(options)
    return out


REFUSED = [
    (lambda s: changed(s, 2, exp_avg=torch.zeros(40, 41)), r"exp_avg of parameter 2 has shape \(40, 41\) in the state"),
    (lambda s: changed(s, 4, master=torch.zeros(7)), r"parameter 4 has shape \(7,\) in the state and \(7, 40"),
    (lambda s: changed(s, 1, exp_avg_sq=None, step=None), "the state of parameter 1 lacks step, exp_avg_sq"),
    (lambda s: in_group(s, amsgrad=True), "made with amsgrad=True"),
    (lambda s: in_group(s, maximize=True), "made with maximize=True"),
    (lambda s: in_group(s, decoupled_weight_decay=False, weight_decay=0.1), "Adam with weight_decay 0.1 added"),
    (lambda s: in_group(s, params=[0, 1]), r"groups of \[2\] parameters"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message[:24] for _, message in REFUSED])
def test_a_state_that_does_not_belong_here_is_refused_whole(change, message):
    """One sentence, and not a bit has changed."""
    model, optimizer = trained()
    wrong = change(optimizer.state_dict())
    go_on(model, optimizer, [5])
    before, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert same_state(before, after) and before["param_groups"] == after["param_groups"]
    assert all(torch.equal(values, weights[name]) for name, values in model.state_dict().items())
    optimizer.close()


def test_states_of_other_optimizers():
    """SGD's momentum is refused; Adam's state without weight decay is AdamW's."""
    theirs = make_model(torch.float32)
    for make, message in (
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "lacks step, exp_avg, exp_avg_sq"),
        (lambda p: torch.optim.Adam(p, lr=0.1), None),
    ):
        other = make(theirs.parameters())
        go_on(theirs, other, [0])
        model, optimizer = trained(torch.float32)
        if message is None:
            optimizer.load_state_dict(other.state_dict())
            assert set(optimizer.param_groups[0]) == {"params", "lr", "betas", "eps", "weight_decay"}
            optimizer.param_groups[0]["weight_decay"] = 0.1
            optimizer.load_state_dict(optimizer.state_dict())
            assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], other.state_dict()["state"][0]["exp_avg"])
        else:
            with pytest.raises(ValueError, match=message):
                optimizer.load_state_dict(other.state_dict())
        optimizer.close()


def test_a_parameter_that_was_frozen_later_is_checked_too():
    """It has state, which is loaded: that of another shape is refused."""
    model, optimizer = trained()
    wrong = changed(optimizer.state_dict(), 2, exp_avg=torch.zeros(40, 41))
    model[2].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 2 has shape \(40, 41\) in the state"):
        optimizer.load_state_dict(wrong)
    optimizer.close()
