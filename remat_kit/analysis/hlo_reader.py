"""Reads scheduled HLO text, as compilers dump it, into the records of `hlo`.

In: the text of a module after optimization; CPU, GPU and TPU write the same grammar. Out: `HloModule`. One pass over the lines.
Two spellings are made plain: `%tuple#2` of newer XLA becomes a get-tuple-element, and what an `async-start` calls stands in
place of its `async-done`, so that readers need not know either.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from remat_kit.analysis.hlo import Computation, Frame, HloModule, Instruction
from remat_kit.analysis.shapes import element_of
from remat_kit.scopes import without_rules

_NAME = re.compile(r"^ +(ROOT )?%?([\w.\-]+) = ")
_ARRAY_OPCODE = re.compile(r"(\S+) ([a-z][\w\-]*)\(")
_TUPLE_OPCODE = re.compile(r"\) ([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+(?:#\d+(?:,\d+)*)?)")
_CALLED = re.compile(
    r"\b(?:calls|body|condition|to_apply|called_computations|branch_computations|true_computation|false_computation)="
    r"(?:%([\w.\-]+)|\{([^}]*)\})"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_OWN_SOURCE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")


def read_module(text: str) -> HloModule:
    """Reads a module.

    Args:
        text: HLO text of one scheduled module.

    Returns:
        Its records.

    Raises:
        ValueError: If the text holds no entry computation.
    """
    lines = text.splitlines()
    if not lines or not lines[0].startswith("HloModule"):
        raise ValueError("This is no HLO text: it must begin with 'HloModule'.")
    frames, start = _read_frames(lines)
    reader = _Reader(frames=frames)
    for line in lines[start:]:
        reader.take(line)
    if not reader.entry:
        raise ValueError("This HLO text has no ENTRY computation: was it cut off?")
    partitions = re.search(r"num_partitions=(\d+)", lines[0])
    name = re.match(r"HloModule ([\w.\-]+)", lines[0])
    return HloModule(
        name=name[1] if name else "",
        computations={name: _inline_async(each, reader.computations) for name, each in reader.computations.items()},
        entry=reader.entry,
        frames=reader.frames,
        num_partitions=int(partitions[1]) if partitions else 1,
        donated=frozenset(int(number) for number in re.findall(r"\((\d+), \{[\d, ]*\}, m\w+-alias\)", lines[0])),
    )


class _Reader:
    """State of the pass over the lines: the open computation, and all closed ones."""

    def __init__(self, *, frames: dict[int, Frame]) -> None:
        self.frames = frames
        self.own_frames: dict[tuple[str, int], int] = {}
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        self._name = ""
        self._root = ""
        self._lines: list[str] = []
        self._open: dict[str, Instruction] = {}

    def take(self, line: str) -> None:
        """Takes one line; an instruction may go on over several, as kernels put texts of their own into attributes."""
        if not self._name:
            if header := _HEADER.match(line):
                self._name = header[2]
                self.entry = header[2] if header[1] else self.entry
        elif line == "}" or line.startswith("}, execution_thread"):
            self._take_instruction()
            self._close()
        elif _NAME.match(line):
            self._take_instruction()
            self._lines = [line]
        else:
            self._lines.append(line)

    def _close(self) -> None:
        instructions = tuple(self._open.values())
        root = self._root or (instructions[-1].name if instructions else "")
        self.computations[self._name] = Computation(name=self._name, instructions=instructions, by_name=self._open, root=root)
        self._name, self._root, self._open = "", "", {}

    def _take_instruction(self) -> None:
        line = "\n".join(self._lines)
        self._lines = []
        match = _NAME.match(line)
        if match is None:
            return
        instruction = _read_instruction(match[2], line[match.end() :], self)
        for operand in instruction.operands:
            if "#" in operand and operand not in self._open:
                self._take_element(operand)
        self._open[match[2]] = instruction
        if match[1]:
            self._root = match[2]

    def _take_element(self, name: str) -> None:
        """Spells out `%tuple#2`, which newer XLA writes for an element of a tuple, as a get-tuple-element of that name."""
        whole, indices = name.split("#")
        for index in indices.split(","):
            source = self._open[whole]
            whole = f"{whole},{index}" if "#" in whole else f"{whole}#{index}"
            self._open[whole] = replace(
                source,
                name=whole,
                shape=element_of(source.shape, int(index)),
                opcode="get-tuple-element",
                operands=(source.name,),
                literal="",
                attributes=f"index={index}",
                called=(),
            )

    def frame_of(self, attributes: str) -> int:
        """Number of the frame; instructions that carry their own file and line get a frame made for them."""
        if match := _FRAME_ID.search(attributes):
            return int(match[1])
        own = _OWN_SOURCE.search(attributes) if "source_file=" in attributes else None
        if own is None:
            return 0
        key = (own[1], int(own[2] or 0))
        if key not in self.own_frames:
            self.own_frames[key] = -1 - len(self.own_frames)
            self.frames[self.own_frames[key]] = Frame(file=key[0], function="", line=key[1], parent=0)
        return self.own_frames[key]


def _read_instruction(name: str, rest: str, reader: _Reader) -> Instruction:
    if rest.startswith("("):
        match = _TUPLE_OPCODE.search(rest)
        shape = rest[: match.start() + 1] if match else ""
    else:
        match = _ARRAY_OPCODE.match(rest)
        shape = match[1] if match else ""
    if match is None:
        raise ValueError(f"This HLO line can't be read: {name} = {rest[:200]}")
    opcode = match[match.lastindex or 1]
    inside, attributes = _split_call(rest, match.end())
    is_leaf = opcode in ("constant", "parameter")
    op_name = _OP_NAME.search(attributes)
    return Instruction(
        name=name,
        shape=shape,
        opcode=opcode,
        operands=() if is_leaf else _operands(inside),
        literal=inside if is_leaf else "",
        attributes=attributes,
        op_name=without_rules(op_name[1].replace("\\", "")) if op_name else "",
        frame=reader.frame_of(attributes),
        called=tuple(_called(attributes)),
    )


def _inline_async(computation: Computation, computations: dict[str, Computation]) -> Computation:
    """Puts what asynchronous starts call in place of the instructions that wait for them."""
    if not any(each.opcode == "async-start" for each in computation.instructions):
        return computation
    plain: dict[str, Instruction] = {}
    for instruction in computation.instructions:
        if instruction.opcode == "async-done":
            plain[instruction.name] = _awaited(instruction, computation, computations)
        elif instruction.opcode == "async-start":
            plain[instruction.name] = replace(instruction, called=())
        else:
            plain[instruction.name] = instruction
    return replace(computation, instructions=tuple(plain.values()), by_name=plain)


def _awaited(done: Instruction, computation: Computation, computations: dict[str, Computation]) -> Instruction:
    start = computation.by_name[done.operands[0]]
    while start.opcode == "async-update":
        start = computation.by_name[start.operands[0]]
    inner = computations[start.called[0]]
    root = inner.by_name[inner.root]
    parameters = [inner.by_name[operand] for operand in root.operands]
    if any(each.opcode != "parameter" for each in parameters):
        return done
    return replace(
        root,
        name=done.name,
        operands=tuple(start.operands[int(each.literal)] for each in parameters),
        op_name=root.op_name or done.op_name or start.op_name,
        frame=root.frame or done.frame or start.frame,
        started_by=start.name,
    )


def _split_call(rest: str, start: int) -> tuple[str, str]:
    """Splits behind the parenthesis that closes the one before `start`."""
    end = rest.find(")", start)
    if "(" not in rest[start:end]:
        return rest[start:end], rest[end + 1 :]
    depth = 1
    for match in re.finditer(r"[()]", rest[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return rest[start : start + match.start()], rest[start + match.end() :]
    return rest[start:], ""


def _operands(inside: str) -> tuple[str, ...]:
    if "%" in inside:
        return tuple(_OPERAND.findall(inside))
    return tuple(word.split()[-1] for word in re.sub(r"/\*.*?\*/", "", inside).split(",") if word.strip())


def _called(attributes: str) -> Iterator[str]:
    if "=%" not in attributes and "computations={" not in attributes:
        return
    for single, several in _CALLED.findall(attributes):
        if single:
            yield single
        else:
            yield from (name.strip().lstrip("%") for name in several.split(","))


def _read_frames(lines: list[str]) -> tuple[dict[int, Frame], int]:
    """Reads the tables at the module's top; also gives the first line behind them."""
    tables: dict[str, dict[int, str]] = {}
    current: dict[int, str] | None = None
    last = 0
    for number, line in enumerate(lines[1:], 1):
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            current = tables.setdefault(line, {})
        elif line.startswith(("%", "ENTRY")):
            break
        elif current is not None and (row := re.match(r"(\d+) (.*)", line)):
            current[int(row[1])] = row[2]
            last = number
    return _join_frames(tables), last + 1


def _join_frames(tables: dict[str, dict[int, str]]) -> dict[int, Frame]:
    files, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
    locations = {number: _fields(row) for number, row in tables.get("FileLocations", {}).items()}
    frames: dict[int, Frame] = {}
    for number, row in tables.get("StackFrames", {}).items():
        fields = _fields(row)
        location = locations.get(fields.get("file_location_id", 0), {})
        frames[number] = Frame(
            file=files.get(location.get("file_name_id", 0), "").strip('"'),
            function=functions.get(location.get("function_name_id", 0), "").strip('"'),
            line=location.get("line", 0),
            parent=fields.get("parent_frame_id", 1) - 1,  # XLA writes the parent's number plus one
        )
    return frames


def _fields(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}
