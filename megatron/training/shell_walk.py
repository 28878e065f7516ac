"""Which training commands a launch script would start, without running anything. Standard library only.

Conditions that the script does not decide by itself count as met, once: a branch over an unknown value binds it;
but what an unknown value only switches on stays off.
Files exist, programs that are asked for a status fail, `exit` and `while` do nothing.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path

from megatron.training.shell_syntax import Case, Command, For, Function, Group, If, Item, Loop, Node, Token, parse
from megatron.training.shell_values import Values, has_unknown, is_unknown

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(\[[^\]]*\])?\+?=")
_DECLARERS = ("export", "declare", "local", "readonly", "typeset")
_MAX_COMMANDS = 20_000
_MAX_DEPTH = 20
_MAX_ITEMS = 100
_MAX_BYTES = 1 << 20
_VARIABLE = re.compile(r'"?\$\{?([A-Za-z_]\w*)\}?"?\Z')
_OFF = ("", "0", "false", "none", "no", "off")  # an open value that is compared with one of these takes it
_COMPARISONS = ("=", "==", "!=", "=~", "-eq", "-ne", "-lt", "-le", "-gt", "-ge")


def find_commands(text: str, arguments: Sequence[str] = (), folder: Path | None = None) -> list[list[str]]:
    """Return the words of every command that names a .py file, in the order in which they would start.

    arguments: the script's own, $1 and so on; without any they are unknown. folder: where files that the script
    sources are looked for. Where no command is started, variables that hold such a command as text are read instead.
    """
    walk = _Walk(folder)
    if arguments:
        walk.set_arguments(arguments)
    walk.run(text)
    if not walk.found:
        for value in list(walk.values.variables.values()):
            if isinstance(value, str) and ".py" in value and " --" in value:
                walk.run(value)
            elif isinstance(value, list) and any(word.endswith(".py") for word in value):
                walk.found.append(value)
    return walk.found


class _Walk:
    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.values = Values()
        self.functions: dict[str, list[Item]] = {}
        self.found: list[list[str]] = []
        self._commands = 0
        self._depth = 0

    def run(self, text: str) -> bool:
        if self._depth >= _MAX_DEPTH:
            return False
        self._depth += 1
        try:
            return self._items(parse(text))
        finally:
            self._depth -= 1

    def _read(self, path: str) -> str | None:
        """Return the text of a file that the script reads in, if it can be found."""
        if has_unknown(path):  # mostly a folder such as $(dirname "$0"): the file may lie beside the script
            path = path.rsplit("/", 1)[-1]
        if self._folder is None or has_unknown(path):
            return None
        try:
            file = self._folder / path
            return file.read_text(encoding="utf-8", errors="replace") if file.stat().st_size < _MAX_BYTES else None
        except (OSError, ValueError):
            return None

    def set_arguments(self, arguments: Sequence[str]) -> None:
        """Set $1 and so on, $@ and $#."""
        variables = self.values.variables
        for name in [name for name in variables if name.isdigit()]:
            del variables[name]
        variables.update({str(number): word for number, word in enumerate(arguments, start=1)})
        variables["@"] = variables["*"] = list(arguments)
        variables["#"] = str(len(arguments))

    def _items(self, items: list[Item]) -> bool:
        status = True
        for joint, node in items:
            if (joint == "&&" and not status) or (joint == "||" and status):
                continue
            status = self._node(node)
        return status

    def _node(self, node: Node) -> bool:
        self._commands += 1
        if self._commands > _MAX_COMMANDS:
            return False
        if isinstance(node, Command):
            return self._command(node.words)
        if isinstance(node, Group):
            return self._items(node.body)
        if isinstance(node, Function):
            self.functions[node.name] = node.body
        elif isinstance(node, If):
            for condition, body in node.branches:
                if not condition or self._items(condition):
                    return self._items(body)
        elif isinstance(node, For):
            for value in [field for word in node.words for field in self.values.expand(word)][:_MAX_ITEMS]:
                self.values.variables[node.name] = value
                self._items(node.body)
        elif isinstance(node, Case):
            return self._case(node)
        elif isinstance(node, Loop):
            return True  # mostly the reading of options
        return True

    def _case(self, node: Case) -> bool:
        value = self.values.text(node.word)
        for patterns, body in node.arms:
            texts = [self.values.text(pattern) for pattern in patterns]
            if is_unknown(value) and texts and not set(texts[0]) & set("*?["):
                self._bind(node.word, texts[0])
                return self._items(body)
            if not has_unknown(value) and any(fnmatch.fnmatchcase(value, text) for text in texts):
                return self._items(body)
        return True

    def _bind(self, raw: str, value: str) -> None:
        match = _VARIABLE.match(raw)
        if match:
            self.values.variables[match.group(1)] = value

    def _command(self, tokens: list[Token]) -> bool:
        negated = tokens[0].text == "!"
        tokens = tokens[1:] if negated else tokens
        while tokens and self._assign(tokens[0], only=all(map(_is_assignment, tokens))):
            tokens = tokens[1:]
        if not tokens:
            return not negated
        first = tokens[0].text
        if tokens[0].kind == "arith":
            return self._arithmetic(first) != negated
        if first in ("[[", "[", "test"):
            return self._test([token.text for token in tokens[1:] if token.text not in ("]", "]]")]) != negated
        if first in _DECLARERS:
            for token in tokens[1:]:
                self._assign(token, only=True)
            return True
        words = [field for token in tokens for field in self.values.expand(token.text)]
        return self._words(words) != negated

    def _arithmetic(self, expression: str) -> bool:
        """Carry out ((name = value)) and return whether the value is not 0; open values count as not 0."""
        match = re.match(r"\s*([A-Za-z_]\w*)\s*=(?!=)(.*)\Z", expression, re.DOTALL)
        value = self.values.arithmetic(match.group(2) if match else expression)
        if match:
            self.values.variables[match.group(1)] = value
        return value != "0"

    def _assign(self, token: Token, only: bool) -> bool:
        """Carry an assignment out (before a command it lasts for that command alone: read over)."""
        if not _is_assignment(token):
            return False
        if only:
            self.values.assign(token.text, token.items if token.kind == "array" else None)
        return True

    def _words(self, words: list[str]) -> bool:
        if not words:
            return True
        first = words[0]
        if first == "eval":
            return self.run(" ".join(words[1:]))
        if first in ("source", ".") and len(words) > 1:
            text = self._read(words[1])
            return text is not None and self.run(text)
        script = _inline_script(words)
        if script is not None:
            return self.run(script)
        if first in self.functions and self._depth < _MAX_DEPTH:
            self.set_arguments(words[1:])
            self._depth += 1
            try:
                return self._items(self.functions[first])
            finally:
                self._depth -= 1
        if any(word.endswith(".py") for word in words) and first not in ("echo", "printf", "cp", "ls", "cat"):
            self.found.append(words)
        return first not in ("false", "grep", "command", "which", "pgrep")

    def _test(self, words: list[str]) -> bool:
        """Return what [ words ] yields; `&&`, `||`, `-a`, `-o` and `!` are understood."""
        for joint in ("||", "-o"):
            if joint in words:
                at = words.index(joint)
                return self._test(words[:at]) or self._test(words[at + 1 :])
        for joint in ("&&", "-a"):
            if joint in words and words.index(joint) > 0:
                at = words.index(joint)
                return self._test(words[:at]) and self._test(words[at + 1 :])
        if words and words[0] == "!":
            return not self._test(words[1:])
        self.values.in_test = True
        try:
            values = [self.values.text(word) for word in words]
        finally:
            self.values.in_test = False
        if len(values) == 3 and words[1] in _COMPARISONS:
            return self._compare(words, values)
        if len(values) == 2 and words[0] in ("-z", "-n"):
            return (values[1] == "") == (words[0] == "-z")
        return bool(values) and values[-1] != ""

    def _compare(self, words: list[str], values: list[str]) -> bool:
        left, comparison, right = values[0], words[1], values[2]
        if has_unknown(left) or has_unknown(right):
            off = right in _OFF
            if comparison in ("=", "==", "-eq") or (comparison == "!=" and off):
                self._bind(words[0], right)
            return not (comparison == "!=" and off)
        if comparison.startswith("-"):
            try:
                difference = int(left or 0) - int(right or 0)
            except ValueError:
                return False
            return {
                "-eq": difference == 0,
                "-ne": difference != 0,
                "-lt": difference < 0,
                "-le": difference <= 0,
                "-gt": difference > 0,
                "-ge": difference >= 0,
            }[comparison]
        if comparison == "=~":
            return bool(re.search(re.escape(right), left))
        return fnmatch.fnmatchcase(left, right) != (comparison == "!=")


def _is_assignment(token: Token) -> bool:
    return token.kind == "array" or (token.kind == "word" and bool(_ASSIGNMENT.match(token.text)))


def _inline_script(words: list[str]) -> str | None:
    """Return the script of `bash -c script`, wherever it stands in a command (srun bash -c ...)."""
    for index, word in enumerate(words[:-2]):
        if word.rsplit("/", 1)[-1] in ("bash", "sh") and "c" in words[index + 1] and words[index + 1].startswith("-"):
            return words[index + 2]
    return None
