"""The rules of tests/conftest.py, tried on a small suite of its own."""

from __future__ import annotations

from pathlib import Path

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).with_name("conftest.py").read_text()


def make_suite(pytester):
    pytester.makeini("[pytest]\nmarkers =\n  gpu: x\n  multi_gpu: x\n  full: x\n")
    tests = pytester.mkdir("tests")
    (tests / "conftest.py").write_text(CONFTEST)
    (tests / "test_plain.py").write_text(
        "import pytest\ndef test_quick(): pass\n@pytest.mark.full\ndef test_long(): pass\n"
    )
    for folder in ("gpu", "multi_gpu"):
        (tests / folder).mkdir()
        (tests / folder / f"test_{folder}.py").write_text("def test_device(): pass\n")
    # A torch without devices, so that the outcome does not depend on this machine.
    (pytester.path / "torch").mkdir()
    (pytester.path / "torch" / "__init__.py").write_text("class cuda:\n    device_count = staticmethod(lambda: 0)\n")


def test_long_tests_are_deselected_by_default(pytester):
    """Without --full a test marked `full` is deselected and device tests are skipped."""
    make_suite(pytester)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, skipped=2, deselected=1)


def test_a_test_that_leaves_a_post_mortem_is_named(pytester):
    """One that a test left in the repository's root is an error of that test alone; older ones are nobody's."""
    make_suite(pytester)
    pytester.mkdir("postmortem_1_before")
    (pytester.path / "tests" / "test_leaves.py").write_text(
        "from pathlib import Path\n"
        "def test_one(): Path(__file__).parents[1].joinpath('postmortem_2_error_rank0').mkdir()\n"
        "def test_two(): pass\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "tests/test_leaves.py")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["*ERROR at teardown of test_one*", "*postmortem_2_error_rank0 in * folder of its own*"]
    )


def test_full_runs_everything(pytester):
    """With --full the long test runs too."""
    make_suite(pytester)
    result = pytester.runpytest_subprocess("--full", "-rs")
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines(["*needs 2 CUDA device(s), this machine has 0*"])
