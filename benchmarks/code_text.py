"""A calibration text of Python code: the modules of the standard library of the Python that runs this.

    python benchmarks/code_text.py code.txt --without python-heldout.txt

Modules that share more than a tenth of their longer lines with a text of --without are left out, and so are
tests, tables of encodings and examples. The rows of `code` in docs/records.md are of CPython 3.11.
"""

import argparse
import sysconfig
from pathlib import Path

#: parts of the paths of modules that are no ordinary code
LEFT_OUT = (
    "test",
    "site-packages",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "encodings/",
    "turtledemo",
    "config-",
)
#: characters of a longer line; a module has at least LEAST_LINES
LONG, LEAST_LINES = 40, 10
LARGEST_SHARE = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--without", type=Path, action="append", default=[], help="a text for an evaluation")
    options = parser.parse_args()
    known = "\n".join(path.read_text(encoding="utf-8") for path in options.without)
    root = Path(sysconfig.get_paths()["stdlib"])
    modules, left = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in name for part in LEFT_OUT):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # of another encoding
            continue
        lines = [line for line in text.split("\n") if len(line) > LONG]
        if len(lines) >= LEAST_LINES:
            shared = sum(line in known for line in lines) / len(lines)
            (modules if shared <= LARGEST_SHARE else left).append(text)
    options.out.write_text("\n\n".join(modules), encoding="utf-8")
    print(f"{options.out}: {len(modules)} modules; {len(left)} are in the texts of --without")


if __name__ == "__main__":
    main()
