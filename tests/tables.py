"""Tables in Markdown pages."""


def table_rows(page: str, first_header: str) -> list[list[str]]:
    """The cells of the Markdown table whose first column is called `first_header`."""
    lines = page.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first_header} |"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
