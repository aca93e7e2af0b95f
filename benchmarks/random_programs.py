"""Random programs by the hundred: do all objectives agree, do predictions and files work, does any order matter?

``python benchmarks/random_programs.py --seeds 0 200`` draws a program and a guide from every seed, checks them as
``tests/test_random_programs.py`` does (``tests/program_checks.py`` says what is checked), and prints how many programs
had each guide and each part, and how many of them failed. The failures follow by seed. Every seed is
a line of JSON in ``--out``; seeds found there are not repeated. A process takes ``--each`` seeds, because compiled
programs fill memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import jax
from program_checks import check, random_case


def run(seed: int, directory: Path) -> dict[str, Any]:
    """Check one program under one guide: what it was, and what was wrong."""
    program, guide = random_case(seed)
    error = None
    try:
        check(program, guide, directory)
    except Exception as raised:
        where = traceback.extract_tb(raised.__traceback__)
        last = next(frame for frame in reversed(where) if Path(frame.filename).name == "program_checks.py")
        error = f"{last.name}, {type(raised).__name__}: {str(raised) or last.line}"
    jax.clear_caches()
    return {"seed": seed, "guide": guide, "parts": parts(program), "error": error}


def parts(program: Any) -> list[str]:
    """What a program is made of, as rows of the table."""
    functions = program.functions.values()
    levels = len(program.levels) + 1
    found = {
        f"{levels} layer{'s' if levels > 1 else ''}": True,
        "a function at two levels": len(set(program.levels)) < len(program.levels),
        "two observed sites": program.second,
        "grid": any(f.form == "grid" for f in functions),
        "exact process": program.is_exact,
        "additive kernel": any(f.kernel == "additive" for f in functions),
        "ARD": any(f.kernel == "ard" for f in functions),
        "sum of functions": "part" in program.functions,
        "projection": program.project,
        "mixed outputs": program.mix,
        "skip connections": program.skip,
        "latents": program.latent,
        "group plates": program.groups,
        "mask": program.mask,
        "subsampling plate": program.batch == "plate",
        "dgp.minibatch": program.batch == "arguments",
        "priors of hyperparameters": program.scale or program.lengths,
        "last values drawn": program.drawn,
    }
    return [*(name for name, holds in found.items() if holds), program.likelihood]


def table(records: list[dict[str, Any]]) -> str:
    """Programs and failures by guide and by part, then the failures."""
    lines = ["| | programs | failed |", "|---|---|---|"]
    by_row: dict[str, list[bool]] = {}
    for record in records:
        for row in (f"guide: {record['guide']}", *record["parts"], "all"):
            by_row.setdefault(row, []).append(record["error"] is not None)
    rows = sorted(by_row, key=lambda row: (row == "all", not row.startswith("guide"), row))
    lines += [f"| {row} | {len(by_row[row])} | {sum(by_row[row])} |" for row in rows]
    lines += [f"\nseed {r['seed']}, {r['guide']}: {r['error']}" for r in records if r["error"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=[0, 200], metavar=("A", "B"), help="from A to B - 1")
    parser.add_argument("--each", type=int, default=10, help="seeds of one process")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "random_programs.jsonl")
    options = parser.parse_args()

    def records() -> dict[int, dict[str, Any]]:
        lines = options.out.read_text().splitlines() if options.out.exists() else []
        return {record["seed"]: record for record in map(json.loads, lines)}

    first, last = options.seeds
    wanted = range(first, last)
    if len(wanted) > options.each:
        for start in range(first, last, options.each):
            block = ["--seeds", str(start), str(min(start + options.each, last)), "--each", str(options.each)]
            subprocess.run([sys.executable, __file__, *block, "--out", str(options.out)], stdout=subprocess.DEVNULL)
            print(f"{sum(seed in records() for seed in wanted)} of {len(wanted)}", flush=True)
    else:
        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_disable_most_optimizations", True)
        warnings.simplefilter("error")
        with tempfile.TemporaryDirectory() as directory:
            for seed in wanted:
                if seed not in records():
                    record = run(seed, Path(directory))
                    with options.out.open("a") as file:
                        file.write(json.dumps(record) + "\n")
    print(table([record for seed, record in sorted(records().items()) if seed in wanted]))


if __name__ == "__main__":
    main()
