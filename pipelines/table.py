"""embeddings/v1 -> another row format, a verdict, or another store. See `--help`."""

from ray_jobs.precompute import convert_table, export_table, verify_table
from ray_jobs.precompute.config import ConvertConfig, ExportConfig, VerifyConfig
from ray_jobs.runtime.command_line import one_line_errors, refuse_relative_paths
from ray_jobs.runtime.options import read_command

COMMANDS = {"convert": ConvertConfig, "verify": VerifyConfig, "export": ExportConfig}


def main() -> None:
    """Run one of the three commands."""
    with one_line_errors():
        command = read_command(COMMANDS, description=__doc__)
        refuse_relative_paths(command)
        match command:
            case ConvertConfig():
                convert_table.run(command)
            case VerifyConfig():
                verify_table.run(command)
            case ExportConfig():
                export_table.run(command)


if __name__ == "__main__":
    main()
