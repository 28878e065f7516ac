"""InterleavedAdamW is a true torch optimizer, and gives the oracle's bits."""

import copy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from oracle import OracleParam, round_weight

from deep_offload.model.hardware import profile_to_json
from deep_offload.model.machines import BUILT_IN_PROFILES
from deep_offload.optimizer.torch import InterleavedAdamW
from deep_offload.runtime.measure import fingerprint
from tests.optimizer.torch_cases import groups_of, loss_of, make_model, offload

BETAS = (0.9, 0.95)


@pytest.fixture(autouse=True)
def profile(tmp_path_factory, monkeypatch):
    """Rates are measured once for all tests here."""
    monkeypatch.setenv("DEEP_OFFLOAD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_the_chosen_slots_are_used(tmp_path):
    """With nothing resident the number of slots is the model's: six are allocated, one for each streamed subgroup, and
    the bits are those of one."""
    h200 = BUILT_IN_PROFILES["h200"]
    link = {name: getattr(h200, name) / 2 for name in h200.__dataclass_fields__ if name.startswith(("h2d_", "d2h_"))}
    machine = fingerprint(torch.device("cpu"), 1)
    rates = replace(h200, op_overhead_seconds=0.0, fingerprint=machine, **link)
    (tmp_path / "rates.json").write_text(profile_to_json(rates))
    ends = []
    for slots in ("auto", 1):
        settings = dict(offload_gpu_share=0.5, offload_num_slots=slots, offload_profile=str(tmp_path / "rates.json"))
        model = make_model()
        optimizer = InterleavedAdamW(model.parameters(), offload=offload(**settings))
        assert optimizer.engine.plan.num_slots == (6 if slots == "auto" else 1)
        assert ("6 slots instead of 4 shorten" in optimizer.placement_lines[2]) == (slots == "auto")
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
        optimizer.close()
    assert all(torch.equal(one, other) for one, other in zip(*ends))


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(offload_gpu_share=0.0, offload_grad_wire="param"),
        dict(offload_gpu_share=1.0, offload_split_master="off"),
        dict(offload_resident_fraction=1.0),
        dict(offload_gpu_share="auto", offload_stride=3, offload_resident_fraction=0.3),
    ],
    ids=["half", "cpu", "streamed", "resident", "stride3"],
)
@pytest.mark.parametrize("flush_in_backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_oracle_bits_with_groups_scheduler_and_clipping(settings, flush_in_backward, dtype):
    """Groups with their own lr, betas, eps and decay, a scheduler and clipping: 20 steps give the oracle's bits."""
    if dtype == torch.float32 and settings.get("offload_grad_wire") == "param":
        settings = {**settings, "offload_grad_wire": "fp32"}
    model = make_model(dtype)
    optimizer = InterleavedAdamW(
        groups_of(model),
        lr=1e-2,
        betas=BETAS,
        offload=offload(**settings),
        max_grad_norm=0.3,
        flush_in_backward=flush_in_backward,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0 / (1 + 0.1 * k))
    oracle = {p: OracleParam(p) for p in model.parameters()}
    clipped = 0
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, step, scale=4.0).backward()
        grads = {p: p.grad.clone() for p in model.parameters()}
        optimizer.step()
        clip = min(1.0, 0.3 / (optimizer.last_grad_norm + 1e-6))
        clipped += clip < 1.0
        for group in optimizer.param_groups:
            for p in group["params"]:
                oracle[p].update(
                    grads[p],
                    lr=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    scale=clip,
                )
        scheduler.step()
    assert clipped >= 10
    state = optimizer.state_dict()
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    for index, p in enumerate(ordered):
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(state["state"][index][name], getattr(oracle[p], name)), f"{name} of parameter {index}"
        assert torch.equal(p.detach(), oracle[p].weight())
        assert state["state"][index]["step"] == 20
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 3.0)
    optimizer.close()


def test_gradient_norm_is_torchs():
    """The norm that clips is the norm of all gradients."""
    model = make_model(torch.float32)
    optimizer = InterleavedAdamW(model.parameters(), offload=offload(), max_grad_norm=1.0)
    loss_of(model, 0).backward()
    want = torch.linalg.vector_norm(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(want.item(), rel=1e-6)
    optimizer.close()


def test_parameter_without_gradient_is_skipped_like_in_torch():
    """grad=None leaves value, moments and step of that parameter alone; frozen parameters own nothing."""
    model = make_model()
    frozen, skipped = model[0].weight, model[2].weight
    frozen.requires_grad_(False)
    optimizer = InterleavedAdamW(model.parameters(), lr=1e-2, offload=offload())
    before = {p: p.detach().clone() for p in model.parameters()}
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step > 0:
            skipped.grad = None
        optimizer.step()
        if step == 0:
            before[skipped] = skipped.detach().clone()
    assert torch.equal(skipped, before[skipped])
    assert torch.equal(frozen, before[frozen])
    assert not torch.equal(model[4].weight, before[model[4].weight])
    steps = {index: int(s["step"]) for index, s in optimizer.state_dict()["state"].items()}
    assert steps == {1: 3, 2: 1, 3: 3, 4: 3, 5: 3}
    optimizer.close()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_parameter_written_by_the_user_refreshes_its_master(share):
    """After an in-place write or a new `.data` the next update starts from the written value."""
    model = make_model()
    optimizer = InterleavedAdamW(
        model.parameters(), lr=1e-2, weight_decay=0.0, offload=offload(offload_gpu_share=share)
    )
    loss_of(model, 0).backward()
    optimizer.step()
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    model[2].weight.data = torch.full_like(model[2].weight, -0.25)
    optimizer.zero_grad(set_to_none=False)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(model[0].weight, torch.full_like(model[0].weight, 0.5))
    assert torch.equal(model[2].weight, torch.full_like(model[2].weight, -0.25))
    state = optimizer.state_dict()["state"]
    assert torch.equal(state[0]["master"], torch.full((40, 24), 0.5))
    optimizer.close()


def test_edited_gradients_are_what_is_used():
    """Gradients edited after backward, in place or replaced, are updated from, even if they had been flushed before."""
    runs = []
    for flush in (False, True):
        model = make_model()
        optimizer = InterleavedAdamW(
            model.parameters(), lr=1e-2, offload=offload(offload_gpu_share=0.0), flush_in_backward=flush
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            model[0].weight.grad.mul_(0.5)
            model[2].weight.grad = torch.ones_like(model[2].weight)
            optimizer.step()
        runs.append([p.detach().clone() for p in model.parameters()])
        assert torch.allclose(optimizer.state_dict()["state"][2]["exp_avg"], torch.tensor(1 - 0.9**3), rtol=1e-6)
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_two_backwards_accumulate():
    """Two backwards before a step accumulate, with gradients flushed in backward or not."""
    runs = []
    for flush in (False, True):
        model = make_model()
        optimizer = InterleavedAdamW(model.parameters(), lr=1e-2, offload=offload(), flush_in_backward=flush)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, 2 * step).backward()
            loss_of(model, 2 * step + 1).backward()
            optimizer.step()
        runs.append([p.detach().clone() for p in model.parameters()])
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradient_skips_the_step(bad):
    """NaN or inf in one gradient element leaves parameters and state bitwise untouched and is counted."""
    model = make_model()
    optimizer = InterleavedAdamW(
        model.parameters(), lr=1e-2, offload=offload(), max_grad_norm=1.0, flush_in_backward=True
    )
    loss_of(model, 0).backward()
    optimizer.step()
    before, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    model[2].bias.grad[3] = bad
    optimizer.step()
    after = optimizer.state_dict()
    assert optimizer.num_skipped_steps == 1
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    for index, saved in before["state"].items():
        assert all(torch.equal(saved[name], after["state"][index][name]) for name in saved)
    optimizer.close()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_state_dict_resumes_bitwise_under_another_placement(share):
    """Six steps are three steps, a state dict into a fresh optimizer with another placement, and three more."""

    def run(steps, model, optimizer):
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    model = make_model()
    straight = InterleavedAdamW(groups_of(model), lr=1e-2, offload=offload())
    run(range(6), model, straight)
    first = make_model()
    one = InterleavedAdamW(groups_of(first), lr=1e-2, offload=offload())
    run(range(3), first, one)
    second = make_model()
    second.load_state_dict(first.state_dict())
    two = InterleavedAdamW(
        groups_of(second), lr=7.0, offload=offload(offload_gpu_share=share, offload_subgroup_numel=333)
    )
    two.load_state_dict(one.state_dict())
    run(range(3, 6), second, two)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), second.parameters(), strict=True))
    a, b = straight.state_dict(), two.state_dict()
    assert a["param_groups"] == b["param_groups"]
    for index in a["state"]:
        assert all(torch.equal(a["state"][index][name], b["state"][index][name]) for name in a["state"][index])
    for optimizer in (straight, one, two):
        optimizer.close()


def test_state_of_torch_adamw_loads():
    """A state dict of torch.optim.AdamW continues here; masters follow the parameters."""
    model = make_model(torch.float32)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        theirs.zero_grad()
        loss_of(model, step).backward()
        theirs.step()
    twin = copy.deepcopy(model)
    ours = InterleavedAdamW(twin.parameters(), lr=5.0, offload=offload())
    ours.load_state_dict(theirs.state_dict())
    for m, o in ((model, theirs), (twin, ours)):
        o.zero_grad()
        loss_of(m, 9).backward()
        o.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)
    ours.close()


def test_closure_and_optimizer_protocol():
    """step(closure) returns its loss; it is a torch Optimizer; late groups are refused."""
    model = make_model()
    optimizer = InterleavedAdamW(model.parameters(), offload=offload())
    assert isinstance(optimizer, torch.optim.Optimizer)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(loss_of(make_model(), 0).item())
    with pytest.raises(ValueError, match="give all groups to the constructor"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    optimizer.close()


def test_fp16_needs_a_loss_scale():
    """fp16 parameters without a loss scale are refused with a sentence; with one they are unscaled exactly."""
    model = make_model(torch.float16)
    with pytest.raises(ValueError, match="float16 and no loss_scale was given"):
        InterleavedAdamW(model.parameters(), offload=offload())
    optimizer = InterleavedAdamW(model.parameters(), lr=1e-2, offload=offload(), loss_scale=1024.0)
    oracle = {p: OracleParam(p) for p in model.parameters()}
    (loss_of(model, 0) * 1024.0).backward()
    grads = {p: p.grad.clone() for p in model.parameters()}
    optimizer.step()
    for p, o in oracle.items():
        o.update(grads[p], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, scale=1 / 1024.0)
        assert torch.equal(p.detach(), round_weight(o.master, torch.float16))
    optimizer.close()


def test_peer_comparison_per_element():
    """Against torch.optim.AdamW in fp32: each element within 8 ulp-sized errors of the sum of its terms, every step."""
    model = make_model(torch.float32)
    twin = copy.deepcopy(model)
    ours = InterleavedAdamW(model.parameters(), lr=1e-2, betas=BETAS, weight_decay=0.1, offload=offload())
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=BETAS, weight_decay=0.1)
    for step in range(20):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            generator = torch.Generator().manual_seed(step)
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
            with torch.no_grad():
                q.copy_(p)  # one step at a time: the bound is for a step
        state = ours.state_dict()["state"]
        for index, q in enumerate(twin.parameters()):
            if step > 0:
                for name in ("exp_avg", "exp_avg_sq"):
                    theirs.state[q][name].copy_(state[index][name])
        before = [p.detach().clone() for p in model.parameters()]
        ours.step()
        theirs.step()
        for index, (p, q, old) in enumerate(zip(model.parameters(), twin.parameters(), before, strict=True)):
            moment_terms = BETAS[0] * state[index]["exp_avg"].abs() + (1 - BETAS[0]) * p.grad.abs()
            v = ours.state_dict()["state"][index]["exp_avg_sq"] / (1 - BETAS[1] ** (step + 1))
            terms = old.abs() * (1 + 1e-3) + 1e-2 / (1 - BETAS[0] ** (step + 1)) * moment_terms / (v.sqrt() + 1e-8)
            assert ((p - q).abs() <= 8 * 2**-24 * terms).all()
    ours.close()
