"""Remakes the pages' tables of measurements from the JSON files that they name.

A table follows each link to a file in benchmarks/results::

    python benchmarks/tables.py          # rewrites README.md and docs/measurements.md
    python benchmarks/tables.py --check  # exit 1 if that would change one
"""

import re
import sys
from pathlib import Path

from mhcgen.bench.report import markdown
from mhcgen.bench.result import read_result

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "measurements.md")
TABLE = re.compile(
    r"(\(\[JSON\]\((?:\.\./)?(benchmarks/results/\w+\.json)\)\):\n\n)((?:\|.*\n)+)"
)


def with_tables(text: str) -> str:
    """The text, its tables made of their files."""

    def remade(match: re.Match[str]) -> str:
        lines = markdown(read_result(ROOT / match[2]))
        return match[1] + "".join(f"{line}\n" for line in lines)

    return TABLE.sub(remade, text)


def main() -> None:
    """Rewrites or checks the pages."""
    for page in PAGES:
        before = page.read_text("utf-8")
        after = with_tables(before)
        if "--check" not in sys.argv[1:]:
            page.write_text(after, "utf-8")
        elif after != before:
            name = page.relative_to(ROOT)
            sys.exit(f"{name}: its tables are not those of benchmarks/results")


if __name__ == "__main__":
    main()
