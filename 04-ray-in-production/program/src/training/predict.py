"""Label texts with a run's best checkpoint. Prints a label and its probability for each line of input.

python -m training.predict runs/RUN lines.txt
echo 'loop = get_running_loop()' | python -m training.predict runs/RUN
python -m training.predict runs/RUN --test        the accuracy on the run's test set, as training reported it
"""

import signal
from collections.abc import Iterator

import torch

from shared.distributed import Worker, fail_together
from shared.errors import UsageError
from shared.paths import path_or_uri
from shared.running import options, script
from shared.sampling import rank_loader
from training import data, model, utils
from training.config import Config


def main() -> None:
    """Load the model with its vocabulary and print a label for each line."""
    parser = options.Parser(__doc__)
    parser.add_argument("run", help="folder or URI of the run's checkpoints")
    parser.add_argument(
        "file", nargs="?", help="one text per line; \\n in a line stands for a line break (default: standard input)"
    )
    parser.add_argument("--test", action="store_true", help="print the accuracy on the run's test set instead")
    args = parser.parse_args()
    with fail_together():
        path, state = utils.best_state(path_or_uri(args.run))
    config = Config.model_validate(state["config"])
    if state["vocabulary"] is None:
        raise UsageError(f"{path} was trained on synthetic data: it cannot read texts")
    vocabulary = data.Vocabulary(**state["vocabulary"])
    network = model.build(config.model, len(vocabulary.tokens) + 2, len(vocabulary.labels))
    network.to(next(iter(state["model"].values())).dtype).load_state_dict(state["model"])
    network.eval()

    def predict(*inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits, computed in the precision of the training."""
        with utils.autocast(config.training.precision, torch.device("cpu")):
            return network(*inputs)

    if args.test:
        with fail_together():
            folder = data.prepare(config.dataset, config.paths.processed_data_dir, config.cluster.num_workers[1])
            splits = data.load(config.dataset, folder)
            data.check_same(state, splits)
        correct = sum(
            int((predict(*inputs).argmax(dim=1) == labels).sum())
            for *inputs, labels in rank_loader(splits.test, 256, Worker())
        )
        print(correct / len(splits.test))
        return
    for line in read_lines(args.file):
        probabilities = torch.softmax(predict(*vocabulary.encode([line.replace("\\n", "\n")]))[0], dim=0)
        print(f"{vocabulary.labels[int(probabilities.argmax())]}\t{probabilities.max():.3f}\t{line.rstrip()}")


def read_lines(path: str | None) -> Iterator[str]:
    """Yield the lines of a file, or of standard input. Raises UsageError if they cannot be read."""
    name = path or "standard input"
    if name.lower().endswith(data.SUFFIXES):
        raise UsageError(f"{name}: one text per line is expected, not rows with labels: write the texts to a .txt file")
    try:
        with open(path or 0, encoding="utf-8-sig") as file:  # 0: standard input, in UTF-8 whatever the locale
            yield from file
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not text in UTF-8: {error}") from error


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly where nobody reads on, as in `| head`
    with torch.no_grad():
        script.run_main(main, lambda error: str(error).replace("--storage-path", "run"))
