"""Launch scripts as data: a subset of bash, split into words and nested commands. Standard library only.

Nothing is run. What the subset leaves out (globs, job control, arithmetic commands) is read over, never an error:
a script that bash accepts must always yield something, in one pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Token:
    """A `word` (raw, quotes kept), an `op`erator, `array`: name=(...) with its raw words, or `arith`: the inside
    of ((...)).
    """

    kind: str
    text: str
    items: tuple[str, ...] = ()


@dataclass(slots=True)
class Command:
    """A simple command: raw words and array assignments, in order."""

    words: list[Token] = field(default_factory=list)


@dataclass(slots=True)
class If:
    """Branches of (condition, body), tried in order; the last condition is empty for `else`."""

    branches: list[tuple[list[Item], list[Item]]] = field(default_factory=list)


@dataclass(slots=True)
class For:
    """`for name in words; do body; done`."""

    name: str
    words: list[str]
    body: list[Item]


@dataclass(slots=True)
class Loop:
    """`while` or `until`; its body is kept but never walked."""

    body: list[Item]


@dataclass(slots=True)
class Case:
    """`case word in patterns) body ;; esac`."""

    word: str
    arms: list[tuple[list[str], list[Item]]] = field(default_factory=list)


@dataclass(slots=True)
class Function:
    """A definition; `body` runs where the name is called."""

    name: str
    body: list[Item]


@dataclass(slots=True)
class Group:
    """`{ ... }` or `( ... )`."""

    body: list[Item]


Node = Command | If | For | Loop | Case | Function | Group
Item = tuple[str, Node]
"""(what joins it to the item before: "", "&&", "||" or "|", the node)."""

_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")
_OPERATORS = ("&&", "||", ";;&", ";;", ";&", "|&", "|", ";", "&", "(", ")")
_REDIRECTIONS = ("<<<", "<<-", "<<", "&>>", "&>", ">>", ">&", "<&", ">|", ">", "<")
_CLOSING = {"then", "do", "done", "fi", "elif", "else", "esac", "}"}


def tokenize(text: str) -> list[Token]:
    """Return the tokens of a script; comments, redirections and here-documents are left out."""
    return list(_tokens(text))


def _tokens(text: str) -> Iterator[Token]:
    position, heredocs = 0, []
    while position < len(text):
        char = text[position]
        if char in " \t\r":
            position += 1
        elif text.startswith("\\\n", position):
            position += 2
        elif char == "\n":
            yield Token("op", "\n")
            position = _after_heredocs(text, position + 1, heredocs)
            heredocs = []
        elif char == "#":
            position = _line_end(text, position)
        elif text.startswith("((", position):
            end = _skip_parens(text, position)
            yield Token("arith", text[position + 2 : max(end - 2, position + 2)])
            position = end
        elif redirection := next((op for op in _REDIRECTIONS if text.startswith(op, position)), None):
            position += len(redirection)
            while position < len(text) and text[position] in " \t":
                position += 1
            end = _skip_parens(text, position) if text.startswith("(", position) else word_end(text, position)
            if redirection in ("<<", "<<-"):
                heredocs.append(text[position:end].strip("'\"\\"))
            position = end
        elif operator := next((op for op in _OPERATORS if text.startswith(op, position)), None):
            yield Token("op", operator)
            position += len(operator)
        else:
            end = word_end(text, position)
            word = text[position:end]
            if _ARRAY.match(word) and text.startswith("(", end):
                close = _skip_parens(text, end)
                inside = [token.text for token in _tokens(text[end + 1 : close - 1]) if token.kind == "word"]
                yield Token("array", word, tuple(inside))
                end = close
            elif not (word.isdigit() and text[end : end + 1] in ("<", ">")):  # the 2 of 2>&1 is no word
                yield Token("word", word)
            position = max(end, position + 1)


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _after_heredocs(text: str, position: int, delimiters: list[str]) -> int:
    for delimiter in delimiters:
        while position < len(text):
            end = _line_end(text, position)
            line = text[position:end].strip()
            position = end + 1
            if line == delimiter:
                break
    return position


def word_end(text: str, position: int) -> int:
    """Return where the word that begins at `position` ends."""
    while position < len(text):
        char = text[position]
        if char in " \t\r\n;&|<>()":
            break
        position = _skip_unit(text, position)
    return position


def _skip_unit(text: str, position: int) -> int:
    """Return the position behind one character, escape, quoted part or expansion."""
    char = text[position]
    if char == "\\":
        return min(position + 2, len(text))
    if char == "'":
        end = text.find("'", position + 1)
        return len(text) if end < 0 else end + 1
    if char == '"':
        position += 1
        while position < len(text) and text[position] != '"':
            position = _skip_unit(text, position) if text[position] in "\\$`" else position + 1
        return min(position + 1, len(text))
    if char == "`":
        end = text.find("`", position + 1)
        return len(text) if end < 0 else end + 1
    if text.startswith("$(", position):
        return _skip_parens(text, position + 1)
    if text.startswith("${", position):
        position += 2
        while position < len(text) and text[position] != "}":
            position = _skip_unit(text, position)
        return min(position + 1, len(text))
    return position + 1


def _skip_parens(text: str, position: int) -> int:
    """Return the position behind the parenthesis that closes the one at `position`."""
    depth = 0
    while position < len(text):
        char = text[position]
        if char == "#" and text[position - 1] in " \t\n(":
            position = _line_end(text, position)
            continue
        if char in "()":
            depth += 1 if char == "(" else -1
            position += 1
            if depth == 0:
                return position
        else:
            position = _skip_unit(text, position)
    return len(text)


def parse(text: str) -> list[Item]:
    """Return the commands of a script, nested."""
    parser = _Parser(tokenize(text))
    items = parser.items(frozenset())
    while not parser.at_end:  # a stray `done`, `}` or `)`: go on behind it
        parser.next()
        items += parser.items(frozenset())
    return items


class _Parser:
    """Recursive descent over tokens. Every method consumes at least one token or stops at the end."""

    def __init__(self, tokens: list[Token]) -> None:
        self._all = tokens
        self._index = 0

    @property
    def at_end(self) -> bool:
        return self._index >= len(self._all)

    def peek(self) -> Token:
        return self._all[self._index] if not self.at_end else Token("end", "")

    def next(self) -> Token:
        token = self.peek()
        self._index += 1
        return token

    def _skip_blank(self) -> None:
        while self.peek().kind == "op" and self.peek().text in ("\n", ";"):
            self._index += 1

    def items(self, stop: frozenset[str]) -> list[Item]:
        """Return items until a word of `stop`, another closing word, `)` or `;;` stands where a command would."""
        items: list[Item] = []
        joint = ""
        while not self.at_end:
            token = self.peek()
            if token.kind == "op" and token.text in ("&&", "||", "|", "|&", "&", ";", "\n"):
                self._index += 1
                joint = token.text if token.text in ("&&", "||", "|") else "" if token.text != "\n" else joint
                continue
            if token.kind == "op" and token.text in (")", ";;", ";&", ";;&"):
                break
            if token.kind == "word" and (token.text in stop or token.text in _CLOSING):
                break
            items.append((joint, self._node()))
            joint = ""
        return items

    def _accept(self, word: str) -> bool:
        if self.peek().text == word and self.peek().kind in ("word", "op"):
            self._index += 1
            return True
        return False

    def _node(self) -> Node:
        token = self.peek()
        if token.kind == "op":  # "(" is all that is left
            self._index += 1
            group = Group(self.items(frozenset()))
            self._accept(")")
            return group
        special = {
            "if": self._if,
            "for": self._for,
            "select": self._for,
            "while": self._loop,
            "until": self._loop,
            "case": self._case,
            "function": self._function,
            "{": self._braces,
        }.get(token.text if token.kind == "word" else "")
        return special() if special else self._command()

    def _if(self) -> If:
        node = If()
        self._index += 1
        condition = self.items(frozenset({"then"}))
        while self._accept("then"):
            node.branches.append((condition, self.items(frozenset({"elif", "else", "fi"}))))
            if self._accept("elif"):
                condition = self.items(frozenset({"then"}))
            elif self._accept("else"):
                node.branches.append(([], self.items(frozenset({"fi"}))))
        self._accept("fi")
        return node

    def _do(self) -> list[Item]:
        self._skip_blank()
        self._accept("do")
        body = self.items(frozenset({"done"}))
        self._accept("done")
        return body

    def _for(self) -> For:
        self._index += 1
        name, words = self.next().text, []
        if self._accept("in"):
            while self.peek().kind == "word":
                words.append(self.next().text)
        while not self.at_end and self.peek().text not in ("do", "\n", ";"):
            self._index += 1  # the arithmetic form
        return For(name, words, self._do())

    def _loop(self) -> Loop:
        self._index += 1
        self.items(frozenset({"do"}))
        return Loop(self._do())

    def _case(self) -> Case:
        self._index += 1
        node = Case(self.next().text)
        self._skip_blank()
        self._accept("in")
        self._skip_blank()
        while not self.at_end and not self._accept("esac"):
            self._accept("(")
            patterns = []
            while not self.at_end and not self._accept(")"):
                token = self.next()
                if token.kind == "word":
                    patterns.append(token.text)
            node.arms.append((patterns, self.items(frozenset({"esac"}))))
            if self.peek().text in (";;", ";&", ";;&"):
                self._index += 1
            elif self.peek().text != "esac" and not self.at_end:
                self._index += 1
            self._skip_blank()
        return node

    def _function(self) -> Function:
        self._index += 1
        name = self.next().text
        if self._accept("("):
            self._accept(")")
        self._skip_blank()
        return Function(name, [("", self._node())] if not self.at_end else [])

    def _braces(self) -> Group:
        self._index += 1
        group = Group(self.items(frozenset({"}"})))
        self._accept("}")
        return group

    def _command(self) -> Node:
        first = self.next()
        command = Command([first])
        if self.peek().text == "(" and first.kind == "word":  # name() { ... }
            self._index += 1
            self._accept(")")
            self._skip_blank()
            return Function(first.text, [("", self._node())] if not self.at_end else [])
        brackets = first.kind == "word" and first.text == "[["
        while not self.at_end:
            token = self.peek()
            if token.kind == "op" and not (brackets and token.text != "\n"):
                break
            command.words.append(self.next())
            if brackets and token.text == "]]":
                break
        return command
