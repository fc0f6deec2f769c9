"""`moesaic explain`: what a key of a run file means."""

from __future__ import annotations

from typing import Annotated

import typer


def explain(
    key: Annotated[str | None, typer.Argument(help="table.key, a key, or a table; all keys if left out.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
) -> None:
    """Explain a key of a run file: its type, unit, default and meaning."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from moesaic.spec.keys import explain as look_up

    console, entries = Console(), look_up(key)
    if markdown:
        print("| key | type | unit | default | meaning |\n| --- | --- | --- | --- | --- |")
        for entry in entries:
            cells = (f"`{entry.key}`", entry.type, entry.unit, entry.default, entry.help)
            print("| " + " | ".join(cell.replace(" | ", " or ") for cell in cells) + " |")
        return
    if len(entries) == 1:
        entry = entries[0]
        console.print(Text(entry.key, style="bold"))
        console.print(Text(entry.help))
        console.print(Text(f"type     {entry.type}{f' ({entry.unit})' if entry.unit else ''}"))
        console.print(Text(f"default  {entry.default}"))
        return
    table = Table("key", "type", "unit", "default", "meaning", box=None, header_style="bold")
    for entry in entries:
        table.add_row(*(Text(cell) for cell in (entry.key, entry.type, entry.unit, entry.default, entry.help)))
    console.print(table)
