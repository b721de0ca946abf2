"""options of train.py -> the costs of the training: parameters, memory, FLOPs, hours."""

from ray_jobs.runtime.command_line import one_line_errors
from ray_jobs.runtime.options import read_options
from ray_jobs.train.config import TrainConfig
from ray_jobs.train.train import check_inputs, plan

if __name__ == "__main__":
    with one_line_errors():
        config = read_options(TrainConfig, description=plan.__doc__)
        check_inputs(config)
        print("\n".join(plan(config).lines()))
