"""The subset of bash that launch scripts use: what it makes of words, against what bash itself makes of them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from megatron.training.shell_syntax import tokenize
from megatron.training.shell_values import shown
from megatron.training.shell_walk import find_commands

# Each script ends in `run x.py ...`; both sides must pass the same words on.
SAME_AS_BASH = [
    "run x.py a 'b c' \"d e\" f\\ g \\\n  h # comment\n",
    'A="1  2"; run x.py $A "$A" ${A}x "${A}"',
    'A=(1 \'2 3\' 4); run x.py ${A[@]} "${A[@]}" ${#A} ${A[1]} "${A[*]}"',
    "A=(1); A+=(2 3); B=x; B+=y; run x.py ${A[@]} $B",
    "A=(\n  --a 1 # first\n  --b '2 3'\n)\nrun x.py \"${A[@]}\"",
    'E=(); run x.py ${E[@]} "${E[@]}" end',
    "A=5; run x.py $((A * 2 + 1)) $(( ${A} / 2 )) $((-A % 3)) $((A-1))",
    'run x.py ${U:-default} ${U:-"a"b} ${U-x} ${U:+no} "${U:-}"',
    "S=abc; run x.py ${S:+yes} ${S%c} ${S#a} ${S/b/-} ${S^^} ${S,,} ${S%%b*} ${S##*b}",
    "P=/a/b/c.txt; run x.py ${P##*/} ${P%.*} ${P%/*}",
    "A='it is'; B=$A; run x.py \"$B\" '$A' \"\\$A\" \\$A",
    "if [ 1 = 2 ]; then A=1; elif [ 3 -gt 2 ]; then A=2; else A=3; fi; run x.py $A",
    "if [[ 7B == 7* && ! -z x ]]; then A=yes; fi; run x.py $A",
    'if [ -z "$UNSET" ] && [ -n a ]; then A=1; fi; run x.py $A',
    "[ a = b ] && A=1 || A=2\nrun x.py $A",
    "case 13b in 7b) A=1;; 13b|14b) A=2;; *) A=3;; esac; run x.py $A",
    "case x in\n  (y) A=1\n  ;;\n  *)\n    A=2\nesac\nrun x.py $A",
    'for i in a b c; do A+=" --$i"; done; run x.py $A',
    "f() { G=$1; H=$2; }; f one 'two 3'; run x.py $G \"$H\"",
    'function f { A=("$@"); }\nf a \'b c\'\nrun x.py "${A[@]}"',
    "C=\"run x.py --a '1 2' --b\"; eval $C",
    'C=\'run x.py 1\n  2 3\'; eval $C; D="run x.py \\\n 4"; eval "$D"',
    "cat <<EOF\nrun y.py no\nEOF\nrun x.py yes",
    "run x.py a > /dev/null; run x.py b 2>&1 | cat",
    "{ A=1; B=2; }; (C=3); run x.py $A $B",
    'A=1 B=2\nexport C=3 D="4 5"\nrun x.py $A $B $C "$D"',
    "while [ 1 = 2 ]; do A=x; done; A=y; run x.py $A",
    'A=$(echo 1 "2 3"); run x.py $A',
    "run x.py \"a\"'b'c '' \"\" end",
    "set -- p q; true || A=1; true && A=2; run x.py $A",
    "if ! [ a = a ]; then A=1; else A=2; fi; run x.py $A # $(not this",
    'X=08; Y="${X}"; run x.py "--name=$Y/$X" a=b',
    ': "${A:=$((6 * 7))}"; : ${B:=x}; run x.py $A $B',
    "A=3; if (( A > 2 && A != 4 )); then B=1; fi; (( C = A + 1 )); (( A == 9 )) || D=2; run x.py $B $C $D",
    "A=8; run x.py $(expr $A / 2) `expr 3 \\* $A` `# a comment` end",
    "for ((i=0; i<3; i++)); do :; done; run x.py a",
    'A=\'{"k": [1, 2]}\'; run x.py "$A"',
]


def ours(script: str) -> list[list[str]]:
    return [[shown(word) for word in words] for words in find_commands(script)]


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@pytest.mark.parametrize("script", SAME_AS_BASH)
def test_words_are_what_bash_makes_of_them(script):
    """The command gets word for word what bash would pass."""
    define = "run() { for word in run \"$@\"; do printf '%s\\0' \"$word\"; done >&3; printf '\\1' >&3; }\n"
    command = ["bash", "-c", f"exec 3>&1 1>/dev/null\n{define}{script}\n"]
    out = subprocess.run(command, capture_output=True, timeout=20, check=False).stdout.decode()
    theirs = [call.split("\0")[:-1] for call in out.split("\1")[:-1]]
    assert theirs, "bash did not run the command"
    assert ours(script) == theirs


def test_open_values_carry_their_names():
    """Arguments, commands and variables of the environment stay open, also inside longer words."""
    script = "A=$1; B=$(hostname -f | head -n1); C=$HOME/x; D=$((A + 1)); run x.py $A $B $C $D $UNSET ${2:-d} `date`"
    assert ours(script) == [["run", "x.py", "$1", "$command", "$HOME/x", "$computed", "$UNSET", "d", "$command"]]


def test_files_that_a_script_sources_are_read(tmp_path):
    """Settings in a file beside the script count as the script's own; a missing file does not."""
    (tmp_path / "sizes.sh").write_text("LAYERS=7\nARGS=(--hidden-size 64)\n")
    script = ". ./sizes.sh\nsource none.sh\nrun x.py $LAYERS ${ARGS[@]}"
    assert find_commands(script, folder=tmp_path) == [["run", "x.py", "7", "--hidden-size", "64"]]
    assert ours(script) == [["run", "x.py", "$LAYERS", "$ARGS"]]


def test_arguments_can_be_given():
    """With the script's own arguments nothing of them stays open."""
    [words] = find_commands('if [ $# -lt 2 ]; then exit 1; fi; run x.py $1 "${2}" $# "$@"', ["a", "b c"])
    assert words == ["run", "x.py", "a", "b c", "2", "a", "b c"]


def test_an_open_value_takes_the_first_branch_and_keeps_it():
    """A size that is an argument is bound by the first comparison, so that later ones agree; switches stay off."""
    script = """
SIZE=$1; FP8=$2; AC=$3
if [ $SIZE = 7B ]; then L=32; elif [ $SIZE = 13B ]; then L=40; fi
if [ $SIZE = 7B ]; then H=4096; else H=5120; fi
case $AC in full) R=all;; none) R=no;; esac
if [ $FP8 != false ]; then F=on; else F=off; fi
run x.py $L $H $R $F
"""
    assert ours(script) == [["run", "x.py", "32", "4096", "all", "off"]]


def test_the_command_is_found_inside_other_commands():
    """srun, containers and `bash -c` are looked into; text in a variable that nobody runs is read, too."""
    assert ours('A="-u x.py --a 1"\nsrun -l bash -lc "python $A --id \\$SLURM_PROCID"')[0][-1] == "$SLURM_PROCID"
    assert ours("CMD='python x.py --a 1'\nssh host \"$CMD\" &")[0][:2] == ["python", "x.py"]
    assert ours('CMD="python x.py --a 1"') == [["python", "x.py", "--a", "1"]]
    assert ours("CMD=(python x.py --a 1)") == [["python", "x.py", "--a", "1"]]


@pytest.mark.parametrize(
    "script",
    ["f() { f; }; f",
     "eval 'eval \"$A\"'", "A='eval $A'; eval $A", "for i in $(seq 9); do for j in a; do f; done; done",
     "((((((", "))))", "if", "case", "for", "f() ", "${", "$((", "a=(((", "\"", "'", "<<", "<<E", "{ { {", "if if if",
     "fi done esac", "A=${A:-${B:-${C:-", "$((9*9*9*9*9*9*9*9*9*9*9*9*9*9*9))", "[[", "[[ a &&", "! ! !", "&& || |"],
)  # fmt: skip
def test_nothing_recurses_or_hangs(script):
    """Endless recursion, open brackets and stray words end at once."""
    find_commands(script)


def test_comments_and_redirections_are_left_out():
    """Neither comments nor files that output goes to are words."""
    texts = [token.text for token in tokenize("a #b\n c>d 2>>e f#g <h <<<i &>j") if token.kind == "word"]
    assert texts == ["a", "c", "f#g"]
