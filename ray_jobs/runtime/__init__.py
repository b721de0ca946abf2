"""What all stages share: configs, cluster, units of work, progress, tracking, command line."""
