"""fgrams/v1 -> readable tables or JSON. See `--help`."""

import sys

from ray_jobs.runtime.options import read_command
from scone_core.fgrams.inspection import Compare, Coverage, Lookup, Top, render

COMMANDS = {"top": Top, "lookup": Lookup, "compare": Compare, "coverage": Coverage}

if __name__ == "__main__":
    try:
        command = read_command(COMMANDS, description=__doc__)
        print(render(command.tables(), command.form))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
