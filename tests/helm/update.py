"""Write what the tests compare with: golden renders and the docs' table of values. ``python -m tests.helm.update``."""

from __future__ import annotations

from tests.helm.rendering import GOLDEN, golden_text, value_sets
from tests.helm.values_table import PAGE, page_with_table


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    wanted = {f"{name}.yaml": golden_text(values) for name, values in value_sets().items()}
    for path in GOLDEN.glob("*.yaml"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (GOLDEN / name).write_text(text)
    PAGE.write_text(page_with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
