"""Values of words in a launch script: quotes, variables, arrays, arithmetic. Standard library only.

A value that the script itself does not fix (an argument, the output of a command, a variable of the environment) is
an unknown: its name between two NUL characters, which can be part of a longer text.
"""

from __future__ import annotations

import ast
import fnmatch
import math
import operator
import re

from megatron.training.shell_syntax import tokenize

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|\d+|[@*#?])(\[[^\]]*\])?(.*)\Z", re.DOTALL)
_DEFAULT = re.compile(r"(:?[-=+?])(.*)\Z", re.DOTALL)
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(math.copysign(abs(a) // abs(b), a * b)),  # towards zero, as in C
    ast.Mod: lambda a, b: int(math.copysign(abs(a) % abs(b), a)),
}
_COMPARISONS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def unknown(name: str) -> str:
    """Return the unknown value that is called `name`."""
    return f"\0{name}\0"


def has_unknown(text: str) -> bool:
    """Whether any part of the text is unknown."""
    return "\0" in text


def is_unknown(text: str) -> bool:
    """Whether the whole text is one unknown value."""
    return text.count("\0") == 2 and text[0] == text[-1] == "\0"


def shown(text: str) -> str:
    """Return the text with unknown values as `$name`."""
    return re.sub("\0([^\0]*)\0", r"$\1", text)


class Values:
    """The variables of a script, and the expansion of its words."""

    def __init__(self) -> None:
        self.variables: dict[str, str | list[str]] = {}
        self.in_test = False  # inside [ ]: a variable that nobody set is empty instead of unknown

    def assign(self, raw: str, items: tuple[str, ...] | None = None) -> None:
        """Carry out `name=value`, `name+=value`, or, with `items`, `name=(items)` and `name+=(items)`."""
        name, _, value = raw.partition("=")
        appends = name.endswith("+")
        name = name.rstrip("+").split("[")[0]
        old = self.variables.get(name)
        if items is not None:
            new = [field for item in items for field in self.expand(item)]
            if appends and old is not None:
                new = (old if isinstance(old, list) else [old]) + new
            self.variables[name] = new
        elif appends and isinstance(old, list):
            self.variables[name] = [old[0] + self.text(value), *old[1:]] if old else [self.text(value)]
        else:
            self.variables[name] = (old if appends and isinstance(old, str) else "") + self.text(value)

    def text(self, raw: str) -> str:
        """Return a word's value as one text, as on the right of an assignment."""
        return " ".join(self.expand(raw, split=False))

    def expand(self, raw: str, *, split: bool = True) -> list[str]:
        """Return the words that one raw word becomes; unquoted variables are split at white space."""
        fields: list[str] = []
        current: str | None = None
        position, quoted = 0, False
        while position < len(raw):
            char = raw[position]
            if char == "'" and not quoted:
                end = raw.find("'", position + 1)
                end = len(raw) if end < 0 else end
                current = (current or "") + raw[position + 1 : end]
                position = end + 1
            elif char == '"':
                quoted = not quoted
                current = (current or "") if quoted else current
                position += 1
            elif char == "\\" and position + 1 < len(raw):
                following = raw[position + 1]
                keeps = quoted and following not in '$`"\\\n'
                current = (current or "") + ("" if following == "\n" else "\\" * keeps + following)
                position += 2
            elif char in "$`":
                position, values = self._expansion(raw, position)
                if not values and quoted and current == "":
                    current = None  # "${empty[@]}" is no word at all
                current = _join(fields, current, values, split and not quoted)
            else:
                current = (current or "") + char
                position += 1
        if current is not None:
            fields.append(current)
        return fields

    def _expansion(self, raw: str, position: int) -> tuple[int, list[str]]:
        """Return (position behind the expansion, its values: several for an array)."""
        if raw.startswith("$((", position):
            end = _close(raw, position + 1)
            return end, [self.arithmetic(raw[position + 3 : end - 2])]
        if raw.startswith("$(", position):
            end = _close(raw, position + 1)
            inner = raw[position + 2 : end - 1].strip()
            return end, [self._output(inner)]
        if raw[position] == "`":
            end = raw.find("`", position + 1)
            end = len(raw) if end < 0 else end
            return end + 1, [self._output(raw[position + 1 : end].strip())]
        if raw.startswith("${", position):
            end = _close(raw, position + 1)
            return end, self._parameter(raw[position + 2 : end - 1])
        if raw.startswith("$'", position):
            return position + 1, []
        match = _NAME.match(raw, position + 1)
        if match is None:
            return position + 1, ["$"]
        return match.end(), self._lookup(match.group())

    def _output(self, command: str) -> str:
        """Return what a command prints, for the two that compute values, and for comments."""
        name, _, words = command.partition(" ")
        if not command or command.startswith("#"):
            return ""
        if name == "expr":
            return self.arithmetic(words.replace("\\*", "*").replace("'*'", "*"))
        if name != "echo" or set(command) & set("|;&<>"):
            return unknown("command")
        fields = [field for token in tokenize(words) for field in self.expand(token.text)]
        return " ".join(field for field in fields if field not in ("-n", "-e"))

    def _lookup(self, name: str, index: str = "") -> list[str]:
        value = self.variables.get(name)
        if value is None:
            return [""] if self.in_test else [] if name in "@*" else [unknown(name)]
        if isinstance(value, str):
            return [value]
        if index == "[@]" or name == "@":
            return list(value)
        if index == "[*]" or name == "*":
            return [" ".join(value)]
        number = self.text(index[1:-1]) if index else "0"
        return [value[int(number)] if number.isdigit() and int(number) < len(value) else ""]

    def _parameter(self, inner: str) -> list[str]:
        """Return what `${inner}` stands for."""
        match = _PARAMETER.match(inner)
        if match is None:
            return [unknown(inner.strip("!"))]
        length, name, index, operation = match.groups()
        is_set = name in self.variables
        if length and not operation:
            value = self.variables.get(name, "")
            if isinstance(value, list) and index not in ("[@]", "[*]"):
                value = value[0] if value else ""
            return [str(len(value)) if is_set and not has_unknown(str(value)) else unknown(name)]
        default = _DEFAULT.match(operation)
        if default is None:
            return [_edited(value, operation) for value in self._lookup(name, index or "")]
        kind, word = default.groups()
        filled = is_set and (self.variables[name] not in ("", []) or not kind.startswith(":"))
        if kind.endswith("+"):
            return self.expand(word) if filled else [""]
        if filled or kind.endswith("?"):
            return self._lookup(name, index or "")
        value = self.text(f'"{word}"') if '"' not in word and "'" not in word else self.text(word)
        if kind.endswith("="):
            self.variables[name] = value
        return [value]

    def arithmetic(self, expression: str) -> str:
        """Return the value of $((expression))."""

        def value_of(match: re.Match[str]) -> str:
            value = self.variables.get(match.group(1), "")
            return value if isinstance(value, str) and value.lstrip("-").isdigit() else "?"

        plain = "".join(self.expand(f'"{expression}"')).strip()
        plain = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", value_of, plain) if not has_unknown(plain) else "?"
        plain = plain.replace("&&", " and ").replace("||", " or ")
        try:
            return str(int(_evaluate(ast.parse(plain.strip(), mode="eval").body)))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return unknown("computed")


def _join(fields: list[str], current: str | None, values: list[str], split: bool) -> str | None:
    """Append an expansion to the field being built; whole fields before the last go to `fields`."""
    for index, value in enumerate(values):
        parts = re.split(r"[ \t\r\n]+", value) if split else [value]
        if index > 0 and current is not None:
            fields.append(current)
            current = None
        for number, part in enumerate(parts):
            if number > 0 and current is not None:
                fields.append(current)
                current = None
            if part or not split:
                current = (current or "") + part
    return current


def _close(raw: str, position: int) -> int:
    """Return the position behind the bracket that closes the one at `position`."""
    opening = raw[position]
    closing = {"(": ")", "{": "}"}[opening]
    depth, quote = 0, ""
    while position < len(raw):
        char = raw[position]
        if char == "\\":
            position += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in (opening, closing):
            depth += 1 if char == opening else -1
            if depth == 0:
                return position + 1
        position += 1
    return len(raw)


def _edited(value: str, operation: str) -> str:
    """Apply `%pattern`, `#pattern`, `/old/new`, `,,` or `^^`; anything else makes the value unknown."""
    if not operation or has_unknown(value):
        return value
    if operation in (",,", "^^"):
        return value.lower() if operation == ",," else value.upper()
    if operation[0] in "%#":
        longest = operation[:2] in ("%%", "##")
        pattern = operation[2:] if longest else operation[1:]
        cuts = range(len(value) + 1) if (operation[0] == "%") == longest else range(len(value), -1, -1)
        for cut in cuts:
            removed = value[cut:] if operation[0] == "%" else value[:cut]
            if fnmatch.fnmatchcase(removed, pattern):
                return value[:cut] if operation[0] == "%" else value[cut:]
        return value
    if operation[0] == "/":
        old, _, new = operation.lstrip("/").partition("/")
        return value.replace(old, new, -1 if operation.startswith("//") else 1) if old else value
    return unknown("edited")


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        return _COMPARISONS[type(node.ops[0])](_evaluate(node.left), _evaluate(node.comparators[0]))
    if isinstance(node, ast.BoolOp):
        values = [bool(_evaluate(value)) for value in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    raise ValueError
