"""Print how big each room is and what is nearest to its budget: `make size`. Reads source; changes nothing."""

from __future__ import annotations

import ast
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "steelyard"
FILE_BUDGET, FUNCTION_BUDGET = 350, 50


def main() -> None:
    rooms: dict[str, list[tuple[int, str]]] = {}
    functions: list[tuple[int, str]] = []
    for path in sorted(SRC.rglob("*.py")):
        name = str(path.relative_to(SRC))
        text = path.read_text()
        rooms.setdefault(name.split("/")[0].removesuffix(".py"), []).append((text.count("\n"), name))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                functions.append((length, f"{name}:{node.lineno} {node.name}"))
    print(f"{'room':<12} {'files':>5} {'lines':>6}  longest file (budget {FILE_BUDGET})")
    for room, files in sorted(rooms.items()):
        longest = max(files)
        print(f"{room:<12} {len(files):>5} {sum(n for n, _ in files):>6}  {longest[1]} {longest[0]}")
    print(f"{'all':<12} {sum(map(len, rooms.values())):>5} {sum(n for fs in rooms.values() for n, _ in fs):>6}")
    print(f"\nlongest functions (budget {FUNCTION_BUDGET}; compiled kernels excepted)")
    for length, name in sorted(functions, reverse=True)[:8]:
        print(f"{length:>5}  {name}")


if __name__ == "__main__":
    main()
