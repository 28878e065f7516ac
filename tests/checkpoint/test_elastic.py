"""A checkpoint loads under any other layout, placement and storage: fp32 state bitwise equal for each parameter."""

from __future__ import annotations

import itertools

import pytest

from tests.checkpoint.cases import MODEL, OFFLOAD, load, train, words

LAYOUTS = {
    "one": (1, ""),
    "dp2": (2, ""),
    "dp4": (4, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "tp2 pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "tp2 dp2": (4, "--tensor-model-parallel-size 2"),
    "pp2 dp2": (4, "--pipeline-model-parallel-size 2"),
    "pp2 vpp2": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --overlap-grad-reduce",
    ),
}

PLACEMENTS = {
    "resident": "",
    "cpu": OFFLOAD + " --offload-gpu-share 0",
    "gpu": OFFLOAD + " --offload-gpu-share 1 --offload-subgroup-numel 2048",
    "half": OFFLOAD + " --offload-resident-fraction 0.5 --offload-gpu-share 0.5 --offload-subgroup-numel 1000",
    "split": OFFLOAD + " --offload-gpu-share 0.5 --offload-split-master on --offload-subgroup-numel 3000",
}

SOURCES = {"one": "half", "dp4": "cpu", "tp2 pp2": "split", "pp2 vpp2": "gpu"}


@pytest.fixture(scope="module", params=SOURCES)
def saved(request, pool, tmp_path_factory):
    """A checkpoint of iteration 3, the layout it was saved with, and the hashes of its state."""
    folder = tmp_path_factory.mktemp("elastic")
    ranks, flags = LAYOUTS[request.param]
    tied = "" if request.param == "pp2 vpp2" else "--untie-embeddings-and-output-weights"
    model = f"{MODEL} {tied} --train-iters 20 --exit-interval 3 --save-interval 100"
    argv = words(model, flags, PLACEMENTS[SOURCES[request.param]], f"--save {folder}")
    result = pool.run(train, argv, ranks=ranks)[0]
    return request.param, folder, model, result


def _targets(source: str) -> list[tuple[str, str]]:
    """Eight pairs of layout and placement; over the sources together other ones each time."""
    start = list(SOURCES).index(source)
    placements = list(PLACEMENTS)
    layouts = [name for number, name in enumerate(LAYOUTS) if number != start]
    return [(name, placements[(number + start) % len(placements)]) for number, name in enumerate(layouts)][:8]


def _check(pool, saved, targets):
    source, folder, model, expected = saved
    for layout, placement in targets:
        ranks, flags = LAYOUTS[layout]
        argv = words(model, flags, PLACEMENTS[placement], f"--load {folder}")
        for result in pool.run(load, argv, ranks=ranks):
            wrong = {key for key in expected["entries"] if result["entries"].get(key) != expected["entries"][key]}
            assert not wrong, f"{source} -> {layout}, {placement}: {sorted(wrong)[:5]}"
            assert result["entries"].keys() == expected["entries"].keys()
            assert (result["iteration"], result["samples"], result["step"]) == (3, 12, 3)
            assert result["digest"] == expected["digest"]


def test_any_layout_and_placement_loads_the_same_bits(pool, saved):
    """Thirty-two pairs of a saving and a loading run, in which every layout and placement comes several times."""
    _check(pool, saved, _targets(saved[0]))


@pytest.mark.full
def test_every_layout_with_every_placement_loads_the_same_bits(pool, saved):
    """The whole product, from each source."""
    _check(pool, saved, itertools.product(LAYOUTS, PLACEMENTS))
