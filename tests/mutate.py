"""Changes one line of the package at a time and has the tests notice: `python tests/mutate.py`.

    python tests/mutate.py --count 60 --seed 1 gptfast/run gptfast/host gptfast/optim.py

Each mutant is one small fault (a comparison turned, `max` for `min`, `and` for `or`, a number one
off, a `not` lost) at a place drawn by the seed. The test files that import the module run first,
then the others; what survives all of them is printed, to be killed by a test that says what a user
would lose, or to be explained. The file is put back after each, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
WORDS = {"max": "min", "min": "max", "any": "all", "all": "any"}
Mutant = tuple[Path, ast.expr, str]
"""A file, the expression in it that is replaced, and what by."""


def mutants(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file whose expression stands on one line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # Python 3.11 does not know where in the line a part of an f-string stands.
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr))
    lost = {id(part) for string in strings for part in ast.walk(string)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr) or node.lineno != node.end_lineno or id(node) in lost:
            continue
        match node:
            case ast.Compare(left, [op], [right]):
                yield path, node, f"{ast.unparse(left)} {SWAPS[type(op)]} {ast.unparse(right)}"
            case ast.BoolOp(op, values):
                word = " or " if isinstance(op, ast.And) else " and "
                yield path, node, f"({word.join(map(ast.unparse, values))})"
            case ast.UnaryOp(ast.Not(), operand):
                yield path, node, f"({ast.unparse(operand)})"
            case ast.Call(ast.Name(name), _, _) if name in WORDS:
                yield path, node.func, WORDS[name]
            case ast.BinOp(left, ast.Add() | ast.Sub() as op, right):
                sign = "-" if isinstance(op, ast.Add) else "+"
                yield path, node, f"({ast.unparse(left)} {sign} {ast.unparse(right)})"
            case ast.Constant(bool() | int() as value):
                yield path, node, str(not value if isinstance(value, bool) else value + 1)


def mutated(text: str, node: ast.expr, by: str) -> str:
    lines = text.encode().splitlines(keepends=True)  # ast counts bytes
    line = lines[node.lineno - 1]
    lines[node.lineno - 1] = line[: node.col_offset] + by.encode() + line[node.end_col_offset :]
    return b"".join(lines).decode()


def noticed(tests: list[Path]) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-n", "2", "--dist", "worksteal"]
    return bool(tests) and bool(
        subprocess.run(
            [*command, *map(str, tests)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            timeout=1800,
        ).returncode
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("places", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--near", action="store_true", help="only tests that import the module")
    asked = parser.parse_args()
    files = [f for p in asked.places for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    found = [mutant for file in files for mutant in mutants(file)]
    every = sorted((ROOT / "tests").glob("test_*.py"))
    survived = 0
    for path, node, by in random.Random(asked.seed).sample(found, asked.count):
        module = ".".join(path.with_suffix("").parts)
        folder, _, name = module.rpartition(".")
        near = [
            test
            for test in every
            if module in (text := test.read_text(encoding="utf-8"))
            or f"from {folder} import {name}" in text
        ]
        text = path.read_text(encoding="utf-8")
        try:
            path.write_text(mutated(text, node, by), encoding="utf-8")
            killed = noticed(near) or (
                not asked.near and noticed([test for test in every if test not in near])
            )
        finally:
            path.write_text(text, encoding="utf-8")
        survived += not killed
        said = "killed" if killed else "SURVIVED"
        print(f"{said} {path}:{node.lineno}: {ast.unparse(node)} -> {by}", flush=True)
    print(f"{survived} of {asked.count} survived")


if __name__ == "__main__":
    main()
