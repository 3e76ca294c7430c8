"""Label texts with a run's best checkpoint: one line in, one line out, with the label and its probability.

python -m training.predict runs/RUN lines.txt
echo 'loop = get_running_loop()' | python -m training.predict runs/RUN
python -m training.predict runs/RUN --test        its accuracy on the run's test set, as training has reported it
"""

from collections.abc import Iterator

import torch

from shared import options, script
from shared.distributed import Worker, fail_together
from shared.errors import UsageError
from shared.sampling import rank_loader
from training import data, model, utils
from training.config import Config


def main() -> None:
    """Load the model with its vocabulary, and answer."""
    parser = options.Parser(__doc__)
    parser.add_argument("run", help="folder or URI of the run's checkpoints")
    parser.add_argument(
        "file", nargs="?", help="a text a line; its escapes \\n stand for ends of lines (default: standard input)"
    )
    parser.add_argument("--test", action="store_true", help="print the accuracy on the run's test set instead")
    args = parser.parse_args()
    with fail_together():
        path, state = utils.best_state(options.path_or_uri(args.run))
    config = Config.model_validate(state["config"])
    if state["vocabulary"] is None:
        raise UsageError(f"{path} was trained on synthetic data: it reads no texts")
    vocabulary = data.Vocabulary(**state["vocabulary"])
    network = model.build(config.model, len(vocabulary.tokens) + 2, len(vocabulary.labels))
    network.to(next(iter(state["model"].values())).dtype).load_state_dict(state["model"])
    network.eval()
    if args.test:
        with fail_together():
            splits = data.load(config, data.prepare(config))
            data.check_same(state, splits)
        correct = sum(
            int((network(*inputs).argmax(dim=1) == labels).sum())
            for *inputs, labels in rank_loader(splits.test, 256, Worker())
        )
        print(correct / len(splits.test))
        return
    for line in lines_of(args.file):
        probabilities = torch.softmax(network(*vocabulary.encode([line.replace("\\n", "\n")]))[0], dim=0)
        print(f"{vocabulary.labels[int(probabilities.argmax())]}\t{probabilities.max():.3f}\t{line.rstrip()}")


def lines_of(path: str | None) -> Iterator[str]:
    """The lines of a file, or of standard input. Raises UsageError for what cannot be read."""
    name = path or "standard input"
    try:
        with open(path or 0, encoding="utf-8-sig") as file:  # 0: standard input, whatever the locale says
            yield from file
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not text in UTF-8: {error}") from error


if __name__ == "__main__":
    with torch.no_grad():
        script.run_main(main)
