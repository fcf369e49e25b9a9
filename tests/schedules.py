"""Which transfers of a compiled program run beside an attention kernel, or beside a product of XLA: read from its text, where
the instructions of a computation stand in the order in which they begin."""

from __future__ import annotations

import re
from dataclasses import dataclass

_KERNEL = re.compile(r'custom_call_target="(tpu_custom_call|triton_kernel_call\w*|__cudnn\$fmha\w*)"')
_PRODUCT = re.compile(r" dot\(| convolution\(|__cublas\$|__triton\w*_gemm")
_SENT = re.compile(
    r"(?:ROOT )?%([\w.\-]+) = (.*?) (collective-permute|all-gather|all-to-all|reduce-scatter)(-start)?\("
)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]+)\]")  # and no scalars, which say where a transfer stands
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computations?)=\{?((?:%[\w.\-]+(?:, )?)+)")


@dataclass(frozen=True)
class Transfer:
    """A collective of a program. beside: the kernels between its start and its end, themselves or in what is called there."""

    kind: str
    bytes: int
    computation: str
    beside: tuple[str, ...]


def _bytes(shapes: str) -> int:
    total = 0
    for dtype, dims in _ARRAY.findall(shapes):
        size = 1
        for n in filter(None, dims.split(",")):
            size *= int(n)
        total += size if dtype == "pred" else size * int(re.sub(r"\D", "", dtype)) // 8
    return total


def _computations(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line and not line[0].isspace():
            lines = []
            if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
                found[head[1]] = lines
        elif " = " in line:
            lines.append(line.strip())
    return found


def transfers(text: str, least: int = 0, *, products: bool = False) -> list[Transfer]:
    """Returns the transfers of a compiled program that send so many bytes; one inside a loop once. With `products` what they
    run beside is XLA's products, and not kernels."""
    computations, known = _computations(text), {}
    wanted = _PRODUCT if products else _KERNEL

    def kernels(line: str) -> list[str]:
        if wanted.search(line):
            return [line.split(" = ")[0].removeprefix("ROOT ")]
        return [k for names in _CALLED.findall(line) for name in names.split(", ") for k in inside(name.strip("%"))]

    def inside(name: str) -> list[str]:
        if name not in known:
            known[name] = []
            known[name] = [k for line in computations.get(name, ()) for k in kernels(line)]
        return known[name]

    found = []
    for computation, lines in computations.items():
        for at, line in enumerate(lines):
            sent = _SENT.match(line)
            if sent is None:
                continue
            name, shapes, kind, starts = sent.groups()
            done = re.compile(rf"-done\(.*%{re.escape(name)}\b")
            after = at + 1 if starts else at
            ends = next((i for i in range(after, len(lines)) if done.search(lines[i])), after) if starts else after
            size = _bytes(shapes) // (2 if starts else 1)  # a start has what is sent beside what arrives
            beside = tuple(k for inner in lines[after:ends] for k in kernels(inner))
            if size >= least:
                found.append(Transfer(kind, size, computation, beside))
    return found
