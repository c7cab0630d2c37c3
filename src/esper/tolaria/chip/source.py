"""The device source of one host shape: its segments and every seed that fits its slots.

The text names sizes and places as constants and calls the layers of `layers.cuh`. Nothing in it
depends on which seeds are planted: that is what descriptors say, when it runs.

Shapes are of one sample: `C` channels, `L` positions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import product

from esper.kasmina.blueprints import find_blueprint
from esper.kasmina.hosts import SegmentedHost
from esper.leyline import BlueprintCatalogue, EsperError
from esper.tolaria.chip.tape import INPUT, Buffer, Op, Places, Tape, lay_out, record

THREADS = 512
BLOCKS = 1  # of that many threads that share a multiprocessor, for which registers suffice
SCRATCH = 512  # numbers: sums of warps, and the optimiser's corrections of each module
ABSENT = -1
SHARED_BYTES = 227 * 1024  # that one block may have on the largest GPUs
LIBRARY = ("shim", "layers", "attention", "row", "describe", "flow", "entries")
_SIGNATURES = {  # a seed's y is where all its values are, and so its gy
    "forward": "Cells theta, Values x, Values y",
    "backward": "Cells theta, Cells grads, Values x, Values y, Values gy, Values gx, Cells scratch",
}
_WITH_SCRATCH = ("scalar",)  # layers whose threads all add to one sum


@dataclass(frozen=True)
class ChipProgram:
    """A host shape and its catalogue as source, and what it takes of a block's memory."""

    text: str
    which: Mapping[tuple[int, int], int]  # (slot, blueprint) -> number of its program
    per_sample: int  # numbers of a sample: values, gradients, a seed's own, label and scores
    chunk: int

    def numbers(self, arena: int) -> int:
        """That a block holds, for rows whose parameters take `arena` numbers."""
        return 2 * arena + SCRATCH + self.chunk * self.per_sample


def write_program(
    host: SegmentedHost, catalogue: BlueprintCatalogue, input_size: int, chunk: int
) -> ChipProgram:
    """The source for a host, with every seed of the catalogue that fits one of its slots."""
    specs = host.slot_specs()
    shapes = [(spec.channels, *(size or 0 for size in spec.extent)) for spec in specs]
    writer = ProgramWriter(shapes, len(catalogue.names), input_size, chunk)
    given: tuple[int, ...] = (input_size,)
    for number, segment in enumerate(host.segments):
        tape = record(segment, given, overwritten=False)
        writer.segment(tape)
        given = (shapes[number:] or [()])[0]
    for slot, spec in enumerate(specs):
        for index, name in enumerate(catalogue.names):
            if catalogue.costs[slot][index] >= 0:
                tape = record(find_blueprint(name, spec.family).build(spec), shapes[slot])
                writer.seed(slot, index, tape)
    return writer.finished()


def whole_text(text: str) -> str:
    """Source with the device library that it includes in its place, each file once."""
    for name in (f"{part}.cuh" for part in reversed(LIBRARY)):
        line, library = f'#include "{name}"', (files(__package__) / name).read_text()
        text = text.replace(line, library.replace("#pragma once\n", ""), 1).replace(line, "")
    return text


def require_fitting(program: ChipProgram, arena: int, bytes_each: int, most: int) -> int:
    """The bytes that a block needs; refused where there are not so many."""
    needed = program.numbers(arena) * bytes_each
    if needed > most:
        raise EsperError(
            "A host does not fit on chip",
            given=f"{needed} bytes: {arena} parameters twice, {program.chunk} samples at once with "
            f"{program.per_sample} numbers each",
            valid=f"at most {most} bytes",
            fix='choose backend="fused", a smaller host or fewer shadows',
        )
    return needed


@dataclass
class ProgramWriter:
    """Collects the functions of segments and seeds, and writes the program that has them all."""

    shapes: Sequence[tuple[int, ...]]  # of what passes each slot
    blueprints: int
    input_size: int
    chunk: int
    host_width: int = 0  # parameters of the segments so far
    classes: int = 1  # numbers that the last of them returns
    functions: list[str] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # numbers of each segment beside its output
    which: dict[tuple[int, int], int] = field(default_factory=dict)  # (slot, blueprint) -> seed
    seeds: list[tuple[Tape, Places]] = field(default_factory=list)
    rooms: dict[int, int] = field(default_factory=dict)  # slot -> numbers of its largest seed

    def segment(self, tape: Tape) -> None:
        """The next segment of the host. What it needs beside its output lies behind that, and so do
        the gradients."""
        names: dict[Buffer, str] = {}
        end = 0
        for value in (tape.output, *(v for v in range(1, len(tape.sizes)) if v != tape.output)):
            names["value", value] = f"y + CHUNK * {end}"
            names["gradient", value] = f"gy + CHUNK * {end}"
            end += tape.sizes[value]
        self._add(f"segment_{len(self.kept)}", tape, names, self.host_width, {tape.output})
        self.kept.append(end - tape.sizes[tape.output])
        self.host_width += tape.width
        self.classes = tape.sizes[tape.output]

    def seed(self, slot: int, blueprint: int, tape: Tape) -> int:
        """The number of a seed, the same where another does the same; it adds to the gradient of
        its input."""
        places, known = lay_out(tape), [each for each, _ in self.seeds]
        self.rooms[slot] = max(self.rooms.get(slot, 0), places.size)
        if tape not in known:
            names = {buffer: f"y + CHUNK * {place}" for buffer, place in places.items()}
            self._add(f"seed_{len(known)}", tape, names, 0, {tape.output, INPUT})
            self.seeds.append((tape, places))
        self.which[slot, blueprint] = number = [*known, tape].index(tape)
        return number

    def _add(
        self, title: str, tape: Tape, own: Mapping[Buffer, str], offset: int, begun: set[int]
    ) -> None:
        """Both functions of a tape. `begun`: values whose gradients hold something already."""
        names = {**own, ("value", INPUT): "x", ("gradient", INPUT): "gx"}
        ways = {"forward": [_forward(op, names, offset) for op in tape.ops], "backward": []}
        for op in reversed(tape.ops):
            ways["backward"].append(_backward(op, names, offset, begun))
            begun = begun | set(op.inputs)
        for way, lines in ways.items():
            self.functions.append(f"APART void {title}_{way}({_SIGNATURES[way]}) " + _body(lines))

    def finished(self) -> ChipProgram:
        """The whole text, and the numbers that a sample takes."""
        slots, input_size = len(self.shapes), self.input_size
        sizes = [*(math.prod(shape) for shape in self.shapes), self.classes]
        wide = [size + kept for size, kept in zip(sizes, self.kept, strict=True)]
        values = [input_size + sum(wide[:k]) for k in range(slots + 1)]
        # The gradient of one value is computed from the next one's: two places take turns.
        first, second = (max(wide[turn::2], default=0) for turn in (0, 1))
        start = input_size + sum(wide)
        gradients = [start + (first if k % 2 else 0) for k in range(slots + 1)]
        work = start + first + second
        lengths = [math.prod(shape[1:]) for shape in self.shapes]
        # Neighbours are those along the last axis that has any.
        near = [([1] + [each for each in shape[1:] if each > 1])[-1] for shape in self.shapes]
        gates = [self.rooms.get(k, 0) for k in range(slots)]
        room = [gates[k] + 2 * lengths[k] + sizes[k] for k in range(slots)]
        per_sample = work + max(room, default=0)
        constants = {
            "SLOTS": slots,
            "BLUEPRINTS": self.blueprints,
            "HOST_WIDTH": self.host_width,
            "CHUNK_SAMPLES": self.chunk,
            "SCRATCH": SCRATCH,
            "CLASSES": self.classes,
            "INPUT_SIZE": input_size,
            "PER_SAMPLE": per_sample,
            "WORK_AT": work,
        }
        ends = [(tape.sizes, own, tape.output) for tape, own in self.seeds]
        places = product(range(slots), range(self.blueprints))
        tables = {
            "value_at": values,
            "gradient_at": gradients,
            "slot_channels": [shape[0] for shape in self.shapes],
            "slot_length": lengths,
            "slot_neighbours": near,
            "gate_at": gates,
            "gate_room": room,
            "seed_program": [self.which.get(place, ABSENT) for place in places],
            "seed_width": [tape.width for tape, _ in self.seeds],
            "seed_room": [own.size for _, own in self.seeds],
            "seed_size": [sizes[output] for sizes, _, output in ends],
            "seed_output": [own["value", output] for _, own, output in ends],
            "seed_output_gradient": [own["gradient", output] for _, own, output in ends],
        }
        parts = [
            *(f"#define {name} {number}" for name, number in constants.items()),
            '#include "attention.cuh"',
            *(f"TABLE({', '.join([name, *map(str, tables[name]), '0'])})" for name in tables),
            *self.functions,
            *(_dispatch("segment", way, len(self.kept)) for way in _SIGNATURES),
            *(_dispatch("seed", way, len(self.seeds)) for way in _SIGNATURES),
            '#include "entries.cuh"',
        ]
        return ChipProgram("\n\n".join(parts) + "\n", self.which, 4 + per_sample, self.chunk)


def _body(lines: Sequence[str]) -> str:
    return "{\n" + "".join(f"  {line}\n" for line in lines) + "}"


def _dispatch(kind: str, way: str, count: int) -> str:
    signature = _SIGNATURES[way]
    names = ", ".join(part.split()[-1] for part in signature.split(","))
    cases = [f"case {index}: return {kind}_{index}_{way}({names});" for index in range(count)]
    body = _body(["switch (which) {", *cases, "}"])
    return f"APART void {kind}_{way}(int which, {signature}) {body}"


def _place(base: str, place: int | None, offset: int) -> str:
    return "NOWHERE" if place is None else f"{base} + {place + offset}"


def _forward(op: Op, names: Mapping[Buffer, str], offset: int) -> str:
    values = [*op.inputs, op.output, *([] if op.saved is None else [op.saved])]
    pointers = [_place("theta", place, offset) for place in op.params]
    pointers += [names["value", value] for value in values]
    return f"{op.kind}_forward<{op.sizes}>({', '.join([*op.constants, *pointers])});"


def _backward(op: Op, names: Mapping[Buffer, str], offset: int, begun: set[int]) -> str:
    pointers = [_place("theta", place, offset) for place in op.params[:1]]
    grads = [_place("grads", place, offset) for place in op.params]
    pointers += [place if place == "NOWHERE" else f"grads ? {place} : NOWHERE" for place in grads]
    pointers += [names["value", v] for v in (*op.reads, *([] if op.saved is None else [op.saved]))]
    pointers.append(names["gradient", op.output])
    for value in op.inputs:
        pointers += [names["gradient", value], "true" if value in begun else "false"]
    if op.kind in _WITH_SCRATCH:
        pointers.append("scratch")
    return f"{op.kind}_backward<{op.sizes}>({', '.join([*op.constants, *pointers])});"
