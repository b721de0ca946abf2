"""fgrams/v1 -> readable tables or JSON. See `--help`."""

import sys

import tyro

from scone_core.fgrams.inspection import Compare, Coverage, Lookup, Top, render

if __name__ == "__main__":
    command = tyro.cli(Top | Lookup | Compare | Coverage, description=__doc__)
    try:
        print(render(command.tables(), command.form))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
