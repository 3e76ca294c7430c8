"""Train the text classifier in one process, without Ray.

    python -m training.local_training
    python -m training.local_training --set dataset.kind=file --set dataset.file=reviews.csv
    python -m training.local_training --run-name RUN --resume

It computes the same as distributed_training.py.
"""

from pathlib import Path

from shared import distributed
from shared.running import restarts, script
from training import config as configuration
from training import data, trainer, utils


def main() -> None:
    """Check the configuration, open the run's folder and train."""
    options, config = configuration.parse_command_line(configuration.run_parser(__doc__))
    worker = distributed.join()
    with distributed.fail_together():
        if worker.world_size > 1:
            raise ValueError("this program runs in one process; for several, use distributed_training.py")
        data_folder = data.prepare(
            config.dataset, config.paths.processed_data_dir, config.cluster.num_workers[1], worker.log
        )
        run = restarts.RestartableRun.find(config.paths.model_save_dir, options.run_name)
        state = run.open_or_resume(options.resume, worker)
    folders = trainer.Folders(str(run.folder), data_folder, str(Path(config.paths.log_dir, run.folder.name).absolute()))
    script.stop_on_signals(worker, run.resume_hint)

    result = trainer.train(config, folders, worker, lambda: state, utils.store_in(run, config.checkpoint.keep_best))
    worker.log(f"done: {utils.write_metrics(folders.logs, result)}; checkpoints in {run.folder}")


if __name__ == "__main__":
    script.run_main(main, configuration.name_keys)
