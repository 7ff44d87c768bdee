"""One decoded instruction, and the tables that say what instructions mean.

A module of meanings registers builders by mnemonic. A builder looks at the instruction once and returns what is done
each time it is reached: an effect (the next instruction follows) or, for `jumps`, a step that sets the program counter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from evals.gfx.emulator.memory import EmulatorError
from evals.gfx.emulator.wave import Operand, Wave

Effect = Callable[[Wave], None]
Step = Callable[[Wave], bool]  # True: the wave waits at a barrier

_ENCODINGS = ("_e32", "_e64", "_dpp", "_sdwa", "_vi", "_gfx9")
_FLAGS = frozenset(
    {"offen", "idxen", "glc", "slc", "sc0", "sc1", "nt", "lds", "clamp", "gds", "tfe", "row_mirror", "row_half_mirror"}
)
_WORDS = re.compile(r"(?:[^\s\[(]|\[[^\]]*\]|\([^)]*\))+")
_NAMED_MODIFIER = re.compile(r"([a-z_0-9]+):(.*)")


@dataclass(slots=True)
class Instruction:
    """`name` has no suffix of an encoding; `encoding` keeps the last one that matters: "dpp", "sdwa" or ""."""

    name: str
    encoding: str
    texts: list[str]
    operands: list[Operand]
    modifiers: dict[str, str] = field(default_factory=dict)
    pc: int = 0
    next_pc: int = 0
    fnuz: bool = False

    def numbers(self, modifier: str, default: int, count: int = 4) -> list[int]:
        """Return a modifier that is a list, e.g. op_sel:[0,1]."""
        if modifier not in self.modifiers:
            return [default] * count
        return [int(q, 0) for q in self.modifiers[modifier].strip("[]").split(",")]

    def number(self, modifier: str) -> int:
        """Return a modifier that is a number, or 0."""
        return int(self.modifiers.get(modifier, "0"), 0)

    def unknown(self, what: str = "") -> EmulatorError:
        return EmulatorError(f"not implemented: {self.name} {', '.join(self.texts)} {what}".rstrip())


Builder = Callable[[Instruction], Effect]
Jump = Callable[[Instruction], Step]
BUILDERS: dict[str, Builder] = {}
JUMPS: dict[str, Jump] = {}


def means(*names: str) -> Callable[[Builder], Builder]:
    """Register the builder of these mnemonics."""

    def register(builder: Builder) -> Builder:
        for name in names:
            assert name not in BUILDERS, f"{name} is told twice"
            BUILDERS[name] = builder
        return builder

    return register


def jumps(*names: str) -> Callable[[Jump], Jump]:
    """Register the builder of mnemonics that set the program counter."""

    def register(builder: Jump) -> Jump:
        for name in names:
            assert name not in JUMPS, f"{name} is told twice"
            JUMPS[name] = builder
        return builder

    return register


def parse(mnemonic: str, text: str, pc: int, size: int, fnuz: bool) -> Instruction:
    """Take a line of the disassembler apart."""
    name, encoding = mnemonic, ""
    for suffix in (*_ENCODINGS, *_ENCODINGS):  # "_e64_dpp" has two
        if name.endswith(suffix):
            name = name.removesuffix(suffix)
            encoding = suffix[1:] if suffix in ("_dpp", "_sdwa") else encoding
    texts: list[str] = []
    modifiers: dict[str, str] = {}
    for piece in split_operands(re.sub(r"\s*<[^>]*>\s*$", "", text)):
        head: list[str] = []
        for word in _WORDS.findall(piece):
            named = _NAMED_MODIFIER.fullmatch(word)
            if named and not re.match(r"[vsa]\[", word):
                modifiers[named[1]] = named[2]
            elif word in _FLAGS:
                modifiers[word] = "1"
            elif word != "off" or not head:
                head.append(word)
        if head:
            texts.append(" ".join(head))
    return Instruction(name, encoding, texts, [Operand(t) for t in texts], modifiers, pc, pc + size, fnuz)


def split_operands(text: str) -> list[str]:
    """Split at commas that are in no bracket."""
    pieces, depth, current = [], 0, ""
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            pieces.append(current.strip())
            current = ""
        else:
            current += letter
    return [*pieces, current.strip()] if current.strip() else pieces


def build(instruction: Instruction) -> Step:
    """Return what the instruction does. Errors: EmulatorError for one that no module knows."""
    if instruction.name in JUMPS:
        return JUMPS[instruction.name](instruction)
    if instruction.name not in BUILDERS:
        raise instruction.unknown()
    effect, next_pc = BUILDERS[instruction.name](instruction), instruction.next_pc

    def step(w: Wave) -> bool:
        effect(w)
        w.pc = next_pc
        return False

    return step
